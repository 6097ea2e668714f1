"""Score a checkpoint or a set of pictures: python fid.py checkpoint=results/my-run/latest reference=…

FID, sFID, Inception Score, precision and recall as computed by ADM's evaluator, and KID. All options: configs/fid.yaml.
The work is done in tread/evaluation/scoring.py.
"""

if __name__ == "__main__":
    from tread.runtime.import_guard import guard_imports

    guard_imports(globals())

from tread.evaluation import scoring
from tread.runtime import schema
from tread.runtime.cli import door, open_door
from tread.runtime.distributed import share_work


@door(stopped="stopped; start it again to go on with the parts that are missing")
def main(tree: dict) -> None:
    options = scoring.read_options(tree)
    scoring.run(options, share_work(None, options.cpu_threads))


if __name__ == "__main__":
    open_door(main, schema.known_keys(scoring.ScoringOptions))
