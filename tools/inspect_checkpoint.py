"""Says what a model folder holds, HF or Megatron: family, layout, tensors, dtypes, bytes, step, weight
version, and what is wrong with it.

    python tools/inspect_checkpoint.py FOLDER [--checksums]
    python tools/inspect_checkpoint.py FOLDER --diff OTHER [--checksums]

Headers and manifests alone are read; with --checksums all bytes are. Leaves with 1 where something is wrong
or differs, with 2 where a folder is no model.
"""

import argparse
import sys

from megagrpo.checkpoint.contents import compare_contents, read_contents
from megagrpo.errors import UserError


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--diff", metavar="OTHER", help="tell what differs from another folder instead")
    parser.add_argument("--checksums", action="store_true", help="read all bytes, to compare or verify them")
    options = parser.parse_args(arguments)
    try:
        contents = read_contents(options.folder, options.checksums)
        if options.diff is None:
            print("\n".join(contents.describe()))
            return 1 if contents.problems else 0
        differences = list(compare_contents(contents, read_contents(options.diff, options.checksums)))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(differences) if differences else "no difference")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
