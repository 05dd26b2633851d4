"""The main job of `tangram demo`: a coding agent's trajectories on HumanEval, under Tangram and under a static baseline."""
