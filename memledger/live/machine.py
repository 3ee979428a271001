"""What kind of machine this is, as far as it decides whether and how devices can be sampled."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path("/")

# Graphics processors that use the machine's memory, by the names that drivers give them.
_INTEGRATED: Final = re.compile(r"\b(?:GB10|N1X|Thor|Orin|Xavier|Tegra|Jetson|nvgpu)\b", re.IGNORECASE)
_PCI_AMD: Final = "0x1002"
_PCI_INTEL: Final = "0x8086"


def under_wsl(root: Path = ROOT) -> bool:
    """Whether this is the Windows Subsystem for Linux, whose driver is Windows' own."""
    try:
        return "microsoft" in (root / "proc/sys/kernel/osrelease").read_text(errors="replace").lower()
    except OSError:
        return False


def is_integrated(name: str | None) -> bool:
    """Whether a GPU of this name has no memory of its own but uses the machine's."""
    return _INTEGRATED.search(name or "") is not None


def no_library(root: Path = ROOT) -> str:
    """Why there is no NVML library, and what to do, in one sentence."""
    if (root / "proc/driver/nvidia/version").exists() or (root / "dev/nvidiactl").exists():
        return (
            "NVML library not found though the NVIDIA driver is loaded: start the container with `--gpus` and the driver "
            "capability `utility`, or install the driver's libnvidia-ml.so.1"
        )
    if under_wsl(root):
        return "NVML library not found: under WSL it comes with the Windows driver (/usr/lib/wsl/lib); install or update that"
    other = not_nvidia(root)
    return other or "NVML library not found: no NVIDIA driver is installed here"


def not_nvidia(root: Path = ROOT) -> str | None:
    """The sentence for a machine with another maker's accelerator, or None."""
    maker = _maker(root)
    if maker is None:
        return None
    return f"live sampling is not supported on {maker} yet; logs are read as everywhere"


def _maker(root: Path) -> str | None:
    if sys.platform == "darwin":
        return "Apple GPUs"
    if (root / "dev/davinci_manager").exists() or any((root / "dev").glob("davinci[0-9]*")):
        return "Ascend NPUs"
    if (root / "dev/kfd").exists():
        return "AMD GPUs"
    vendors = {_word(path) for path in (root / "sys/class/drm").glob("card*/device/vendor")}
    if _PCI_AMD in vendors and any((root / "dev/dri").glob("renderD*")):
        return "AMD GPUs"
    if _PCI_INTEL in vendors and any((root / "dev/dri").glob("renderD*")):
        return "Intel GPUs"
    return None


def _word(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
