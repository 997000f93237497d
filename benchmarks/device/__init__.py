"""Is a device right? One command (`check`) runs everything that matters on a GPU."""
