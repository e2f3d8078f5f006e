"""Makes `megagrpo.wire` and `megagrpo.host` importable in an engine's own Python environment.

The folder above is the only entry that such a process gets in PYTHONPATH: the folder that really holds the
package may be a site-packages, whose other packages would then come before the engine's own.
"""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[3])]
