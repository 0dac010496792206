"""The same training step in other libraries, each a script for an environment of its own.

`train.benchmarks.peers` runs them. Those for another environment import nothing of ours but
`serve`, which needs numpy alone.
"""
