"""The GPU executor: services whose weights come and go. Needs `tangram[gpu]`."""
