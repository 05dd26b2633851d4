"""Sandboxes in Docker containers."""

from tangram.executors.docker.backend import DockerBackend
from tangram.executors.docker.engine import DockerUnavailable, Engine
from tangram.executors.docker.leftovers import remove_incarnation
from tangram.executors.docker.profiles import DockerConfig

__all__ = ["DockerBackend", "DockerConfig", "DockerUnavailable", "Engine", "remove_incarnation"]
