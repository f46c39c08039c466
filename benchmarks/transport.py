"""What the transport moves between processes over loopback, beside bare DEALER/ROUTER sockets in the same run.

    python benchmarks/transport.py [--quick] [--rates] [--json FILE] [--agentlace DIR [--agentlace_python PATH]]

The contestants take turns, each in processes of its own; figures are medians over the repetitions. The main ones are
ratios of processor time, both ends together, to two floors: bare sockets, and bare sockets that write each row to a
file first, both also with CURVE. A row is a state of 14 joints, or that and three images of 128x128 noise. `live` rows
travel one to a message, `catch-up` rows as many as the transport puts in one, at most a hundred. Rates count from the
first hand-over to the last acknowledgement. It needs Linux, for what it reads about its processes.

`--agentlace` adds HIL-SERL's transport from a checkout of it. Its server builds a debug message of every request
whether it is printed or not; in the copy that is measured here that line is removed.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from support.cli_args import make_parser, write_figures
from support.transport_baselines.figures import Figures
from support.transport_baselines.measurements import Sizes, journal, parameters, rates, recovery, timing
from support.transport_baselines.processes import deployments

REPEATS = 5


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--agentlace", metavar="DIR", help="a checkout of agentlace, to be measured as well")
    parser.add_argument("--agentlace_python", metavar="PATH", help="interpreter that has what agentlace imports")
    parser.add_argument("--folder", metavar="DIR", default="runs", help="where the journals on disk are written")
    parser.add_argument("--repeats", type=int, help=f"of each measurement; {REPEATS} by default")
    parser.add_argument("--rates", action="store_true", help="rates and processor time alone")
    parser.add_argument("--quick", action="store_true", help="a minute, to see that it works: its figures mean little")
    args = parser.parse_args()
    sizes = Sizes.quick() if args.quick else Sizes()
    repeats = args.repeats or (1 if args.quick else REPEATS)
    Path(args.folder).mkdir(parents=True, exist_ok=True)
    figures = Figures()
    with (
        tempfile.TemporaryDirectory(dir=args.folder) as disk,
        tempfile.TemporaryDirectory(dir="/dev/shm") as tmpfs,
        deployments(Path(disk), args.agentlace, args.agentlace_python or sys.executable) as contestants,
    ):
        for repetition in range(repeats):
            print(f"repetition {repetition + 1} of {repeats}", file=sys.stderr, flush=True)
            rates(figures, contestants, sizes)
            if args.rates:
                continue
            journal(figures, contestants[0], sizes, {"tmpfs": Path(tmpfs), "disk": Path(disk)})
            parameters(figures, contestants, sizes)
            timing(figures, contestants, sizes)
            recovery(figures, contestants, sizes, Path(disk))
    write_figures(args, figures.medians())
    print(figures.table())
    print(f"\nmedians of {repeats} repetitions, maxima over all of them; {os.cpu_count()} processors")


if __name__ == "__main__":
    main()
