"""The benchmarks of `python -m train.benchmark`, one file for each."""
