"""Package definition. NVIDIA Apex is built from source in the GPU image: PyPI's `apex` is an unrelated web
toolkit, never to be listed.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "megagrpo/__init__.py").read_text()).group(1)

LINT = ["ruff>=0.6", "mypy>=1.11"]
TEST = [
    "wandb>=0.17",
    "mkdocs-material>=9.5,<10",  # make docs
    "mlflow-skinny>=3",
    "pytest>=8",
    "pytest-timeout>=2.3",
    "pytest-cov>=5",
    "hypothesis>=6.100",
    *LINT,
]

setup(
    name="megagrpo",
    version=VERSION,
    description="RL post-training of pretrained language models at Megatron scale",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["megagrpo", "megagrpo.*"]),
    package_data={
        "megagrpo": [
            "**/*.yaml",
            "**/*.md",
            "telemetry/report_page/*",
            "py.typed",
            "host/importable/megagrpo/*.py",
        ]
    },
    install_requires=[
        "torch>=2.6",
        "megatron-core>=0.16.1,<0.20",
        "transformers>=5.16,<5.20",
        "math-verify==0.9.0",  # reward `math`; exactly: another version judges answers differently
        "httpx2>=2",  # the HTTP client of transformers' own hub client
        "regex",  # Unicode scripts, reward `language`
        "psutil>=5.9",  # megatron-core's checkpoint writer needs it and does not say so
        "safetensors>=0.5",
        "numpy>=1.26",
        "pydantic>=2.7,<3",
        "PyYAML>=6",
        "rich>=13",
        "typer>=0.12",
        "tensorboard>=2.16",
        "plotly>=5",
    ],
    extras_require={
        "test": TEST,
        "browser": ["playwright>=1.45"],  # tests of the report's page, with Debian's chromium
        "wandb": ["wandb>=0.17"],  # telemetry.writers: [jsonl, wandb]
        "mlflow": ["mlflow-skinny>=3"],  # telemetry.writers: [jsonl, mlflow]
        "vllm": ["vllm>=0.32"],
        "sglang": ["sglang>=0.5.21"],
        "te": ["transformer-engine[pytorch]>=2.9,<2.12"],  # as megatron-core 0.16.1 asks
    },
    entry_points={"console_scripts": ["megagrpo=megagrpo.cli:main"]},
)
