"""jaxamp: the step of `train`, with its guard, and a dynamic loss scale in float16."""

import jax
from jax_task import batch_of, config_of, graphdef_of, params_of, repeated
from serve import Step, Task, serve

import jaxamp
from train.step import TrainState, make_optimizer, make_train_step


def make(task: Task, compute: str) -> Step:
    config, policy = config_of(task), jaxamp.get_policy(f"compute={compute}")
    train_step = make_train_step(config, graphdef_of(config, policy.compute_dtype), policy)
    params = params_of(task)
    opt_state = make_optimizer(config.optimizer, config.num_steps, policy).init(params)
    key_data = jax.random.key_data(jax.random.key(0))
    state = TrainState(jax.numpy.int32(0), params, opt_state, key_data)

    def with_loss(state, batch):
        state, metrics = train_step(state, batch)
        return state, metrics["train/loss"]

    return repeated(with_loss, state, batch_of(task))


if __name__ == "__main__":
    serve(make)
