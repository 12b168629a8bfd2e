"""How a step becomes a device program, with its state in the places it belongs."""
