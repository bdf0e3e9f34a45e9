"""Write the golden losses anew: python tests/golden/make_golden.py. Say in the commit why they changed."""

import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent.parent)]
from tests.small import make_data, pretrain, steps  # noqa: E402

GOLDEN = Path(__file__).parent / "small.losses"


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        records = pretrain(make_data(Path(folder)), Path(folder) / "run")
    GOLDEN.write_text("".join(f"{i + 1} {loss:.6f}\n" for i, loss in enumerate(steps(records, "loss"))))
    print(f"wrote {GOLDEN}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
