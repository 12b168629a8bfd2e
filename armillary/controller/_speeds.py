"""The speed of training in the units that papers use: tokens per second, TFLOP/s, MFU.

A speed is the work of a step times the steps per second. Speeds that are not known are
left out.
"""

import math
from typing import Any

from armillary._format import format_bytes, format_scaled
from armillary.trainer._work import Footprint, Work
from armillary.xla._peaks import find_peak_flops


class Speeds:
    """Converts steps per second into other speeds."""

    def __init__(
        self, tokens_per_example: int | None, peak_flops: float | None
    ) -> None:
        self._tokens_per_example = tokens_per_example
        self._peak_flops = peak_flops
        # Orbit's log lines stay as they are, unless the user asks for more.
        self._are_logged = tokens_per_example is not None or peak_flops is not None
        self._footprint: Footprint | None = None
        self._is_recorded = False
        self.per_device: dict[str, Any] = {}

    def note_program(self, work: Work, footprint: Footprint | None) -> bool:
        """Takes the facts about the first program; returns whether they are new."""
        if footprint is None or self._footprint is not None:
            return False
        self._footprint = footprint
        if self._peak_flops is None:
            self._peak_flops = find_peak_flops(footprint.device_kind)
        facts = {
            "model_flops_per_step": work.flops,
            "state_bytes": footprint.state_bytes,
            "temporary_bytes": footprint.temporary_bytes,
            "peak_flops_per_second": self._peak_flops,
        }
        self.per_device = {name: x for name, x in facts.items() if _is_known(x)}
        return True

    def describe_device(self) -> str:
        """Returns the log line about the work and the memory of each device."""
        facts = self.per_device
        parts = [f"state: {format_bytes(facts['state_bytes'])}"]
        if "temporary_bytes" in facts:
            parts.append(f"temporaries: {format_bytes(facts['temporary_bytes'])}")
        if "model_flops_per_step" in facts:
            flops = format_scaled(facts["model_flops_per_step"], "FLOP")
            parts.append(f"step: {flops}")
        if "peak_flops_per_second" in facts:
            peak = format_scaled(facts["peak_flops_per_second"], "FLOP/s")
            parts.append(f"peak: {peak}")
        return f"each device: {' | '.join(parts)}"

    def take_record(self) -> dict[str, Any]:
        """Returns the facts for the record of the first loop; nothing after that."""
        if self._is_recorded or not self.per_device:
            return {}
        self._is_recorded = True
        return {"per_device": self.per_device}

    def compute(self, work: Work, steps_per_second: float) -> dict[str, float]:
        """Returns the known speeds, by the names that summaries have."""
        examples = work.examples * steps_per_second
        flops = work.flops * steps_per_second
        tokens_per_example = self._tokens_per_example or math.nan
        peak_flops = self._peak_flops or math.nan
        speeds = {
            "examples_per_second": examples,
            "tokens_per_second": examples * tokens_per_example,
            "tflops_per_second_per_device": flops / 1e12,
            "mfu": flops / peak_flops,
        }
        return {name: speed for name, speed in speeds.items() if _is_known(speed)}

    def describe(self, work: Work, steps_per_second: float) -> list[str]:
        """Returns the parts of a log line, if the user has asked for them."""
        if not self._are_logged:
            return []
        speeds = self.compute(work, steps_per_second)
        parts: list[str] = []
        if "tokens_per_second" in speeds:
            parts.append(f"tokens/sec: {speeds['tokens_per_second']:,.0f}")
        if "tflops_per_second_per_device" in speeds:
            tflops = speeds["tflops_per_second_per_device"]
            parts.append(f"TFLOP/s/device: {tflops:.3g}")
        if "mfu" in speeds:
            parts.append(f"MFU: {speeds['mfu']:.1%}")
        return parts


def _is_known(number: float | None) -> bool:
    return number is not None and math.isfinite(number)
