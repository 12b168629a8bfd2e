"""The strategies: one device, several devices, several processes."""

__all__: list[str] = []
