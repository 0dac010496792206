"""The smallest run of the trainer, as flags."""

SMALL = {
    "--model.n-layers": "1",
    "--model.d-model": "16",
    "--model.n-heads": "2",
    "--data.seq-len": "32",
    "--batch-size": "4",
    "--num-steps": "6",
    "--eval-every-steps": "3",
    "--eval-batches": "2",
    "--checkpoint-every-steps": "3",
    "--sample-tokens": "5",
}

# Nothing but steps, until the last one.
RARELY = {"eval_every_steps": 1000, "checkpoint_every_steps": 1000, "sample_tokens": 0}


def flags(workdir, *more, **changes):
    """`changes` are flags by name, with _ for -, and __ for a point."""
    settings = SMALL | {
        "--" + name.replace("__", ".").replace("_", "-"): str(value)
        for name, value in changes.items()
    }
    return [*[part for pair in settings.items() for part in pair], "--workdir", str(workdir), *more]
