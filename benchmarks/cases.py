"""The measured cases: by default, in a hurry, in full, or as chosen."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.protocol import Options

# Two or more replicas, more data kinds and more loop lengths matter where Python's time
# does; `bert` is slow enough for ten steps to hide it.
_CPU_LOOPS = {"mlp": (1, 10, 100), "many-leaves": (1, 10, 100), "cnn": (1, 10, 100)}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One task in one mode.

    Attributes:
        task: Name of the task.
        options: The mode.
        size: `"full"`, or `"small"` for tests of the suite itself.
    """

    task: str
    options: Options
    size: str = "full"

    @property
    def mode(self) -> str:
        """The mode in a few words, for people."""
        options = self.options
        parts = [f"loop {options.steps_per_loop}"]
        if options.devices > 1:
            parts.append(f"{options.devices} devices")
        if options.data != "memory":
            parts.append(options.data)
        if options.dtype != "f32":
            parts.append(options.dtype)
        if options.convolutions != "stock":
            parts.append("canonical convolutions")
        return ", ".join(parts)

    @property
    def is_plain(self) -> bool:
        """True if peers take part: with one device and data in memory."""
        return self.options.devices == 1 and self.options.data == "memory"


def default_cases(platform: str) -> list[Case]:
    """Returns the matrix that `python -m benchmarks` measures and its `--help` lists.

    Args:
        platform: JAX's name of the platform, such as `"cpu"`.
    """
    if platform != "cpu":
        return _accelerator_cases()
    cases = [_case(task, loop) for task, loops in _CPU_LOOPS.items() for loop in loops]
    cases += [_case("cnn", 10, convolutions="stock")]
    cases += [_case("mlp", 100, data=data) for data in ("grain", "resident")]
    cases += [_case("mlp", 100, devices=devices) for devices in (2, 4)]
    cases += [_case("bert", 1), _case("bert", 10), _case("bert", 10, devices=2)]
    return [*cases, _case("bert", 10, data="resident")]


def quick_cases() -> list[Case]:
    """Returns tiny versions of every task: they prove the suite, not a speed."""
    tasks = ("mlp", "many-leaves", "cnn", "bert", "gpt")
    return [replace(_case(task, 10), size="small") for task in tasks]


def choose_cases(
    tasks: Sequence[str],
    loops: Sequence[int],
    devices: Sequence[int] = (1,),
    data: Sequence[str] = ("memory",),
    dtypes: Sequence[str] = ("f32",),
    convolutions: Sequence[str] | None = None,
) -> list[Case]:
    """Returns the product of what was chosen.

    Args:
        tasks: Names of tasks.
        loops: Numbers of steps per loop.
        devices: Numbers of devices.
        data: Kinds of data.
        dtypes: Names of dtypes.
        convolutions: How `cnn` lowers convolutions; by default as `default_cases`.
    """
    cases = []
    for task, kind, count, dtype, loop in itertools.product(
        tasks, data, devices, dtypes, loops
    ):
        ways = convolutions if convolutions and task == "cnn" else (None,)
        for way in ways:
            case = _case(task, loop, way, devices=count, data=kind, dtype=dtype)
            cases.append(case)
    return cases


def _accelerator_cases() -> list[Case]:
    tasks = ("mlp", "many-leaves", "cnn", "bert", "bert-base", "gpt")
    cases = [
        _case(task, loop, convolutions="stock")
        for task in tasks
        for loop in (1, 10, 100)
    ]
    cases += [
        _case(task, loop, dtype="bf16")
        for task in ("bert", "bert-base")
        for loop in (1, 10, 100)
    ]
    cases += [_case("mlp", 100, data="resident")]
    return [*cases, _case("bert-base", 100, data="resident", dtype="bf16")]


def _case(
    task: str,
    steps_per_loop: int,
    convolutions: str | None = None,
    *,
    devices: int = 1,
    data: str = "memory",
    dtype: str = "f32",
) -> Case:
    if convolutions is None:
        convolutions = "canonical" if task == "cnn" else "stock"
    options = Options(
        steps_per_loop=steps_per_loop,
        devices=devices,
        data=data,
        dtype=dtype,
        convolutions=convolutions,
    )
    return Case(task=task, options=options)
