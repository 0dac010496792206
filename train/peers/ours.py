"""jaxamp: the step of `train`, with its guard, and a dynamic loss scale in float16."""

from jax_task import batch_of, config_of, params_of, repeated
from serve import Step, Task, serve

import jaxamp
from train.step import init_state, make_train_step


def make(task: Task, compute: str) -> Step:
    config, policy = config_of(task), jaxamp.get_policy(f"compute={compute}")
    graphdef, state = init_state(config, config.model.vocab_size or 0, policy)
    train_step = make_train_step(config, graphdef, policy)
    state = state._replace(params=params_of(task))

    def with_loss(state, batch):
        state, metrics = train_step(state, batch)
        return state, metrics["train/loss"]

    return repeated(with_loss, state, batch_of(task))


if __name__ == "__main__":
    serve(make)
