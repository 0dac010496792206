"""The trainer: a Flax NNX Transformer in mixed precision. `python -m train.run --help`."""
