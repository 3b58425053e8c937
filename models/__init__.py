"""Example models: one file per model, written for one device."""
