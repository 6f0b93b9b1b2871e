"""Weight offloading inside the compiled graph: run models whose weights do not fit, as one graph, without hooks."""

from .backend import flextensor
from .config import OffloadConfig
from .errors import (
    BudgetError,
    ConfigError,
    GradientError,
    LoadError,
    OffloadError,
    PatternError,
    ProfileError,
    ProgramError,
    SelectionError,
    StoreError,
)
from .loading import load
from .offloaded_dict import OffloadedDict
from .offloading import offload, release
from .packaging import load_package
from .profile import Profile
from .profiling import profile
from .program import Program
from .report import Report, report
from .rewriting import load_program, rewrite
from .selection import Selection, select

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "ConfigError",
    "GradientError",
    "LoadError",
    "OffloadConfig",
    "OffloadError",
    "OffloadedDict",
    "PatternError",
    "Profile",
    "ProfileError",
    "Program",
    "ProgramError",
    "Report",
    "Selection",
    "SelectionError",
    "StoreError",
    "flextensor",
    "load",
    "load_package",
    "load_program",
    "offload",
    "profile",
    "release",
    "report",
    "rewrite",
    "select",
]
