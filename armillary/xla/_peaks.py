"""The peak speeds of known devices."""

# FLOP/s of one device for dense products of bfloat16. NVIDIA's data sheets of A100,
# H100, H200 and B200 state them; figures "with sparsity" are halved here. Google's
# pages "System architecture" of Cloud TPU state them for a chip, which is one device.
# The names are values of `jax.Device.device_kind`.
_PEAKS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "TPU v4": 275e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v5e": 197e12,
    "TPU v5 lite": 197e12,
    "TPU v6e": 918e12,
    "TPU v6 lite": 918e12,
}


def find_peak_flops(device_kind: str) -> float | None:
    """Returns the peak FLOP/s of a kind of device, or `None` if it is not known."""
    if device_kind.startswith("TPU"):
        # The name of a larger or smaller chip begins with the name of another chip.
        return _PEAKS.get(device_kind)
    # The rest of the name says the form and the memory: "NVIDIA H100 80GB HBM3".
    words = device_kind.replace("-", " ").split()
    for count in range(len(words), 0, -1):
        peak = _PEAKS.get(" ".join(words[:count]))
        if peak is not None:
            return peak
    return None
