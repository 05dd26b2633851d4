"""Reading a recorded log: what happened when, and why."""
