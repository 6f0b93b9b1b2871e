"""Profiles as JSON texts, with a version, and back: "format", "version", and "profile" with the fields by name."""

from __future__ import annotations

from ._json_files import JsonFormat
from .errors import ProfileError
from .profile import Profile

PROFILE_FORMAT = JsonFormat(Profile, "profile", 1, ProfileError, "Profile.save", "profile again")
