"""The strategies: one device, several devices, several processes."""
