"""Plug-ins for what others run: evaluation harnesses and serving engines. Each needs its own extra."""
