"""The model that benchmarks compile for chips that are not here."""

import dataclasses

from train import compiled, measures
from train.config import Config, ModelConfig
from train.step import structure
from train.variants import Layers, Variant, make_variants


@dataclasses.dataclass(frozen=True)
class Chip:
    """The model that is compiled for chips that are not here; its attention is not fused."""

    n_layers: int = 8
    d_model: int = 1024
    n_heads: int = 16
    seq_len: int = 1024
    batch_size: int = 8
    vocab_size: int = 32768

    def of(self, config: Config) -> Config:
        """The config with the sizes of this model.

        Raises:
            ValidationError: they do not go together.
        """
        sizes = {name: getattr(self, name) for name in ("n_layers", "d_model", "n_heads")}
        sizes |= {"vocab_size": self.vocab_size, "n_kv_heads": None, "d_ff": None}
        sizes |= {"scan_layers": True}
        return config.model_copy(
            update={
                "batch_size": self.batch_size,
                "model": ModelConfig.model_validate(config.model.model_dump() | sizes),
                "data": config.data.model_copy(update={"seq_len": self.seq_len}),
            }
        )


CHIP = Chip()


def for_chip(
    chip: Chip, config: Config, layers: Layers
) -> tuple[dict[str, Variant], compiled.Shapes]:
    """The variants of the chip's model in bfloat16, and the shapes of its parameters and batch."""
    graphdef, state = structure(chip.of(config), chip.vocab_size, measures.FLOAT32)
    variants = make_variants(chip.of(config), graphdef, "bf16", layers)
    del variants["floor"]  # it is about errors, and multiplies in float32
    return variants, (state.params, compiled.batch_shapes(chip.batch_size, chip.seq_len))
