"""The share of a training that is over, by the limit of its Trainer that ends it first."""

from lightning import Trainer
from lightning.pytorch.callbacks import Timer


def share_of_training(trainer: Trainer, batch_idx: int) -> float:
    """Return the share of the training that is over before a batch: of steps, epochs or time, whichever ends first.

    It is 0 in a training without a limit, and the same in all processes.
    """
    shares = [0.0]
    if trainer.max_steps > 0:
        shares.append(trainer.global_step / trainer.max_steps)
    if trainer.max_epochs is not None and trainer.max_epochs > 0:
        shares.append((trainer.current_epoch + batch_idx / trainer.num_training_batches) / trainer.max_epochs)
    timed = [timer.time_elapsed() / (timer.time_elapsed() + left) for timer, left in timers_of(trainer).items()]
    share = max([*shares, *timed])
    return trainer.strategy.broadcast(share) if timed else share  # clocks of processes differ


def has_end(trainer: Trainer) -> bool:
    """Return True if steps, epochs or time end the training."""
    return trainer.max_steps != -1 or trainer.max_epochs != -1 or any(timers_of(trainer))


def timers_of(trainer: Trainer) -> dict[Timer, float]:
    """Return the timers that end a training, such as that of `max_time`, with the seconds that each leaves."""
    timers = [callback for callback in trainer.callbacks if isinstance(callback, Timer)]  # type: ignore[attr-defined]
    return {timer: left for timer in timers if (left := timer.time_remaining()) is not None}
