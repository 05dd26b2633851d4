"""Measurements of Tangram beside their peers, in one run, so that ratios hold on any machine."""
