"""Videos on disk: written while they are decoded, whole or kept as a playable part, and read back as facts."""

from .audio import AudioTrack
from .mp4 import write_mp4
from .probe import VideoProbe, probe_video
from .settings import VideoSettings, parse_fps

__all__ = ["AudioTrack", "VideoProbe", "VideoSettings", "parse_fps", "probe_video", "write_mp4"]
