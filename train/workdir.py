"""The directory of a run: it holds one run, whose settings lie beside it."""

from pathlib import Path

from train.config import Config, ConfigError, DistributedConfig


def refuse_existing(workdir: Path) -> None:
    """Raises `ConfigError` where a run is there already."""
    if any(
        (workdir / name).exists()
        for name in ("config.json", "metrics.jsonl", "checkpoints", "incidents")
    ):
        raise ConfigError(
            f"--workdir {workdir} holds a run; go on with it by --resume, or name another directory"
        )


def write_config(config: Config, workdir: Path) -> None:
    """Writes `config.json`, whole or not at all."""
    # Where the processes were is no setting of the run: it may go on elsewhere, or alone.
    write_whole(
        workdir / "config.json",
        config.model_copy(update={"distributed": DistributedConfig()}).model_dump_json(indent=2),
    )


def write_whole(path: Path, text: str) -> None:
    """Writes a text file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_name(f"{path.name}.tmp")
    whole.write_text(text + "\n")
    whole.replace(path)
