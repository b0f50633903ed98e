"""Each op against its reference, and then against what the device can do."""
