"""Makes the picture of the README: the report of a run, as a browser shows it.

python tools/make_pictures.py RUN_DIR     (needs chromium and the package playwright: make test-browser)
"""

import argparse
import shutil
from pathlib import Path

from megagrpo.telemetry.report import write_report

TARGET = Path(__file__).parents[1] / "docs" / "pictures" / "report.png"


def main() -> None:
    """Write the page, take the picture of what fits a window."""
    parser = argparse.ArgumentParser(description="make docs/pictures/report.png from a run")
    parser.add_argument("run_dir", type=Path)
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    page_file = write_report([options.run_dir]).resolve()
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 860}, color_scheme="light")
        page.goto(page_file.as_uri())
        page.wait_for_selector("html[data-ready=yes]", timeout=120_000)
        page.wait_for_timeout(2_000)  # the first panels are drawn as they come into view
        page.screenshot(path=TARGET)
        browser.close()
    print(f"{TARGET} written")


if __name__ == "__main__":
    main()
