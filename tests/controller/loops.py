"""A trainer and an evaluator that only count, and a controller for them."""

import armillary


class Loops(armillary.AbstractTrainer, armillary.AbstractEvaluator):
    """Counts steps; functions of the step give its outputs."""

    def __init__(
        self,
        trained=lambda step: {"loss": 1 / step},
        evaluated=lambda step: {"accuracy": step / 100},
    ):
        self.step, self.trained, self.evaluated = 0, trained, evaluated

    def train(self, num_steps):
        self.step += num_steps
        return self.trained(self.step)

    def evaluate(self, num_steps):
        return self.evaluated(self.step)

    def get_state(self):
        return {"step": self.step}

    def set_state(self, state):
        self.step = state["step"]


def make_controller(*outputs, directory=None, **options):
    loops = Loops(*outputs)
    if directory is not None:
        options["checkpoint_manager"] = armillary.CheckpointManager(
            armillary.Checkpoint(loops=loops), directory, checkpoint_interval=10
        )
    options = {"trainer": loops, "evaluator": loops, "steps_per_loop": 10, **options}
    return armillary.Controller(global_step=lambda: loops.step, **options)
