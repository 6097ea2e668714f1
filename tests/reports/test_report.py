"""A run's report. References: the records, files and pictures that lie in the folder, read here by hand; sums worked
out beside the numbers. What a browser makes of the page: test_report_browser.py."""

import base64
import html.parser
import io
import json
import re
import shutil
import sys
from pathlib import Path

import compare_runs
import numpy as np
import pytest
import report
from conftest import ROOT, launch, logged, raising, read_json, write_json
from PIL import Image
from test_comparison import add_records, write_run

import train
from tread.checkpoints.run_log import RunLog
from tread.evaluation.score_files import add_line
from tread.reports import page, runs
from tread.reports.report import subject_of, time_of, troubles_of, write_report
from tread.reports.runs import folders_of

SCORE = {"label_agreement": 0.9, "frechet_pixels": 30.5, "count": 500, "time": "2026-01-02T03:04:05+00:00", "step": 300}
SCORE |= {"counts": {"label_agreement": 500, "frechet_pixels": 1442}, "unavailable": {"fid": "grey pictures"}}
SCORE |= {"settings": {"guidance": "cfg 1.5", "steps": 18, "nfe": 35, "sampler": "heun"}, "warnings": ["few samples"]}


class Reader(html.parser.HTMLParser):
    """A page as people see it: rows of cells, text outside scripts, pictures, the data of its curves."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows, self.text, self.pictures, self.tags, self._open = [], [], [], [], ""
        self.feed(text)
        self.charts = json.loads(re.search(r'id="charts">(.*?)</script>', text, re.S)[1])

    def handle_starttag(self, tag, attributes):
        self._open = tag
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "img":
            self.pictures.append(dict(attributes))

    def handle_data(self, data):
        if self._open in ("td", "th") and self.rows:
            self.rows[-1][-1] += data.strip()
        if self._open not in ("script", "style"):
            self.text.append(data)

    def says(self, words: str) -> bool:
        return words in " ".join("".join(self.text).split())

    def lines(self, title: str, axis: str = "steps") -> dict[str, dict]:
        """The lines of the plot whose title begins so, by name."""
        panels = [chart[axis] for charts in self.charts for chart in charts if axis in chart]
        (panel,) = [panel for panel in panels if panel["title"].startswith(title)]
        return {line["name"]: line for line in panel["lines"]}


@pytest.fixture
def run(tmp_path):
    """The folder of a run that was evaluated twice."""
    write_run(tmp_path / "run", [3.0, 2.0])
    return tmp_path / "run"


def read(*folders) -> Reader:
    return Reader(write_report(folders).read_text(encoding="utf-8"))


def add_picture(folder, step, colour, size=(20, 30), mode="L"):
    path = folder / f"samples/step_{step:07d}.png"
    path.parent.mkdir(exist_ok=True)
    Image.new(mode, size, colour).save(path)
    return path


def write_start(folder, **facts):
    starts = read_json(folder / "run.json")[1:]
    write_json(folder / "run.json", [{**starts[0], **facts}])
    status = {"state": "finished", "step": 300, "time": "2026-01-02T00:00:00+00:00"}
    write_json(folder / "status.json", status)


ROUTE = {"start": 2, "end": 4, "selection_ratio": 0.5}


def test_two_runs_and_what_tells_them_apart(tmp_path):
    routed, dense = tmp_path / "routed", tmp_path / "dense"
    write_run(routed, [3.0, 1.9, 1.8], flops=5.0, model__routes=[ROUTE | {"rejoin": 1}, ROUTE | {"start": 6, "end": 7}])
    write_run(dense, [4.0, 3.0, 2.0], model__name="dit")
    versions = {"git": "0123456789abcdef0123456789abcdef01234567+changes", "torch": "2.9"}
    where = {"device": "cuda:0", "precision": "bf16", "processes": 8, "time": "2026-01-01T21:30:00+00:00"}
    write_start(routed, versions=versions, command=["train.py", "a b"], **where)
    write_report([routed])
    own, found = (routed / "report.html").read_bytes(), read(routed, dense)
    assert (routed / "comparison.html").is_file() and not list(dense.glob("*.html"))
    assert (routed / "report.html").read_bytes() == own
    assert ["tread", "1", "300", "1.800", "52.00", "10.00", "1500"] in found.rows
    assert found.says("tread reaches the evaluation loss 2 of dit by step 200, 0.67 times the other's 300")
    facts = {row[0]: row[1:] for row in found.rows if len(row) == 3}
    assert facts["commit"] == ["0123456789ab+changes", "–"] and facts["device"][0] == "8 processes on cuda:0, bf16"
    assert facts["command"][0] == "python train.py 'a b'" and facts["state"] == ["finished", "not known"]
    assert "; ".join(["r(2→4) at ratio 0.5 with rejoin=1", "r(6→7) at ratio 0.5"]) in facts["network"][0]
    assert facts["images"] == ["2,400 in batches of 8"] * 2 and facts["training time"][0] == "10 minutes"
    assert facts["started"][0] == "2026-01-01 21:30:00 UTC"
    assert facts["model.name"] == ["tread", "dit"] and "results" not in facts and "name" not in facts
    assert found.says("tread: its code differed from the stated commit")


@pytest.mark.parametrize(
    "train, told",
    [
        ({"routes_until": 0}, "no route"),
        ({"routes_until": 100}, "r(2→4) at ratio 0.5; none from step 100 on"),
        ({"ratio_schedule": {"start": 0.75, "end": 0.25}}, "r(2→4) at ratio 0.75 to 0.25"),
    ],
)
def test_a_route_is_told_as_it_was_trained(tmp_path, train, told):
    write_run(tmp_path / "run", [3.0], model__routes=[ROUTE], train={"steps": 300, "batch_size": 8} | train)
    write_report([tmp_path / "run"])
    facts = {row[0]: row[1:] for row in read(tmp_path / "run").rows if len(row) == 2}
    assert facts["network"][0].endswith(f", {told}")


def test_curves_are_the_records_against_steps_flops_and_time(tmp_path):
    routed, dense = tmp_path / "routed", tmp_path / "dense"
    write_run(routed, [3.0, 2.0, 1.5], flops=5e6, seconds=60.0, model__routes=[{"start": 2, "end": 4}])
    write_run(dense, [4.0, 3.0], flops=1e7, seconds=60.0, model__name="dit")
    found = read(routed, dense)
    line = {"name": "tread", "x": [100, 200, 300], "y": [3.0, 2.0, 1.5], "spread": None, "dashed": False}
    line |= {"colour": None, "labels": [], "dots": []}
    assert found.lines("evaluation loss")["tread"] == line
    assert found.lines("evaluation loss", "FLOPs")["dit"]["x"] == [1.0, 2.0]  # 10^9 of them
    assert found.lines("evaluation loss", "time")["tread"]["x"] == pytest.approx([100 / 60, 200 / 60, 5.0], rel=1e-5)
    title = "training loss, with routes (dashed): not comparable to runs without"
    assert {name: line["dashed"] for name, line in found.lines(title).items()} == {"tread": True, "dit": False}
    plain = read(dense)
    assert not next(iter(plain.lines("training loss").values()))["dashed"] and not plain.says("not comparable")


def test_seeds_are_put_together_with_their_spread(tmp_path):
    """Standard deviation: numpy's."""
    losses = [[3.0, 1.0], [4.0, 1.5]]
    folders = [write_run(tmp_path / f"s{seed}", losses[seed], seed=seed) for seed in (0, 1)]
    line = read(*folders).lines("evaluation loss")["tread"]
    assert line["y"] == [3.5, 1.25] and line["spread"] == pytest.approx(np.std(losses, axis=0, ddof=1), rel=1e-5)
    alike = [write_run(tmp_path / f"{seed}/x", losses[seed], seed=seed) for seed in (0, 1)]  # in folders of one name
    assert len({*subject_of([runs.find_run(Path(folder)) for folder in alike]).names.values()}) == 2


def test_long_curves_keep_their_ends_and_at_most_so_many_points(tmp_path):
    write_run(tmp_path / "run", [2.0 - 0.0001 * n for n in range(2 * page.POINTS + 1)])
    (line,) = read(tmp_path / "run").lines("evaluation loss").values()
    assert page.POINTS // 2 < len(line["x"]) <= page.POINTS + 1 and line["x"][0] == 100
    assert line["x"][-1] == 100 * (2 * page.POINTS + 1)


def test_the_pictures_are_the_files_few_of_many_and_small(run, monkeypatch):
    files = {step: add_picture(run, step, step) for step in (50, 100, 150)}
    found = read(run).pictures
    assert [int(picture["data-step"]) for picture in found] == [*files]
    contents = [path.read_bytes() for path in files.values()]
    assert [base64.b64decode(picture["src"].partition(",")[2]) for picture in found] == contents
    assert ["hidden" in picture for picture in found] == [True, True, False]
    files[100].write_bytes(contents[1][:40])
    (run / "samples/step_0000175.png").write_bytes(b"no picture")
    noise = np.random.default_rng(0).integers(0, 255, (2400, 300, 3), dtype=np.uint8)
    Image.fromarray(noise).save(run / "samples/step_0000200.png")
    found = read(run)
    assert [int(picture["data-step"]) for picture in found.pictures] == [50, 150, 200]
    assert found.says(f"{files[100]} can't be read") and found.says("step_0000175.png can't be read")
    small = Image.open(io.BytesIO(base64.b64decode(found.pictures[-1]["src"].partition(",")[2])))
    assert max(small.size) == page.SIDE and found.says("1 pictures are smaller here")
    monkeypatch.setattr("tread.reports.report.PICTURES", 2)
    found = read(run)
    assert len(found.pictures) == 2 and found.says("2 of 5 pictures are here")


def test_scores_have_their_counts_and_notes(run):
    (run / "step_0000300").mkdir()
    write_json(run / "step_0000300/fid.json", SCORE)
    (run / "step_0000300/fid-1.json").write_text("{damaged")
    older = "time,step,count,label_agreement,guidance,nfe\n2026-01-01T00:00:00+00:00,200,100,0.5,none,35\n"
    same = f"{SCORE['time']},300,500,0.9,cfg 1.5,35\n"  # the line of fid.json
    (run / "fid.csv").write_text(older + same)
    (run / "step_0000000").mkdir()
    write_json(run / "step_0000000/fid.json", SCORE | {"step": 0, "time": "2026-01-01"})
    write_json(run / "step_0000300/fid-2.json", SCORE | {"guidance": "cfg 2", "label_agreement": 0.8})  # at once
    found = read(run)
    scores = [row for row in found.rows if row and row[0].startswith("step ")]
    assert scores.pop()[:2] == ["step 300", "0.8"]
    expected = [["step 0", "0.9", "30.5 of 1,442", "500"], ["step 200", "0.5", "–", "100"]]
    assert [row[:4] for row in scores] == [*expected, ["step 300", "0.9", "30.5 of 1,442", "500"]]
    for words in ("few samples", "fid is unavailable: grey pictures", "fid-1.json can't"):
        assert found.says(words)


def test_a_shift_that_is_not_1_stands_beside_the_solver(run):
    """In fid.json and fid.csv alike, whose lines are one scoring; two that differ by their shift alone are two."""
    for number, shift in enumerate((1.0, None, 0.3)):
        times = {"shift": shift, "time": f"2026-01-0{min(2, 1 + number)}", "settings": {"sampler": "euler"}}
        record = SCORE | times | {"nfe": 9}
        write_json(run / f"fid-{number}.json", record)
        add_line(run / "fid.csv", record)
    head, *rows = [row for row in read(run).rows if "solver" in row or row[:1] == ["step 300"]]
    assert [row[head.index("solver")] for row in rows] == ["euler", "euler", "euler, shift 0.3"]


def test_where_the_time_went(tmp_path):
    """By hand: of 60 s of training 4 s the first step, 0.25·16 + 0.5·40 s waiting; the rest as stated."""
    run = tmp_path / "run"
    write_run(run, [])
    add_records(
        run,
        {"step": 10, "seconds": 20.0, "data_wait": 0.25, "cold_start_seconds": 9.0, "first_step_seconds": 4.0},
        {"step": 10, "seconds": 20.0, "eval_loss": 1.0, "eval_seconds": 3.0},
        {"step": 20, "seconds": 60.0, "data_wait": 0.5, "draw_seconds": 2.0, "save_seconds": 1.0},
    )
    write_json(run / "status.json", {"state": "finished", "spent": {"save_seconds": 1.5}})
    spent = {"start, before the first step": 5.0, "the first step of each start": 4.0, "other training steps": 32.0}
    spent |= {"waiting for data": 24.0, "evaluation loss": 3.0, "drawing samples": 2.0, "saving checkpoints": 2.5}
    assert time_of(runs.find_run(run)) == pytest.approx(spent)
    rows = read(run).rows
    assert ["waiting for data", "24 seconds, 33.1%"] in rows and ["in all", "72.5 seconds"] in rows


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("metrics.jsonl", '{"step": 1, "loss": 2.0}\n{"step": 2, "lo', "1 of 2 lines of metrics.jsonl can't be read"),
        ("metrics.jsonl", '3\n[]\n{"step": "x"}\n{"step": 7, "loss": NaN}\n', "3 of 4 lines of metrics.jsonl"),
        ("metrics.jsonl", "", "metrics.jsonl is damaged or empty"),
        ("run.json", "[{", "run.json is damaged"),
        ("run.json", '[{"config": {"model": {"name": "dit"}, "train": {"steps": []}}}]', "its settings are not known"),
        ("step_0000100/fid.json", '{"counts": {"fid": {}}, "warnings": 3, "settings": 1, "fid": 5.0}', "FID ↓"),
        ("run.json", '[{"config": 3}, {"config": {}, "warnings": 4, "versions": 5}]', "its settings are not known"),
        ("status.json", "[1]", "status.json is damaged"),
        ("status.json", None, "status.json is missing"),
        ("step_0000100/info.json", "{", "info.json is damaged"),
        ("fid.csv", "\0\n\"", "digits"),
        ("sweep.csv", "scale\n", "digits"),
    ],
)  # fmt: skip
def test_what_is_damaged_is_said_and_the_rest_is_shown(run, tmp_path, name, content, said):
    write_start(run)
    path = run / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True) if content is None else path.write_text(content)
    found = read(run)
    assert found.says(said) and found.says("What ran")
    if name != "metrics.jsonl":
        assert ["run", "1", "300" if name != "status.json" else "200", "2.000"] == found.rows[1][:4]
    other = tmp_path / "other"
    write_run(other, [3.0, 2.0], model__name="dit")
    assert read(other, run).says(said)  # beside a whole one, too


def test_a_plugin_that_is_gone_is_a_problem_of_the_run(run):
    write_start(run)
    path = run / "run.json"
    starts = json.loads(path.read_text())
    starts[-1]["config"]["plugins"] = ["/nowhere/gone.py"]
    path.write_text(json.dumps(starts))
    found = read(run)
    assert found.says("plugins names /nowhere/gone.py, which can't be imported") and found.says("What ran")


def test_a_checkpoint_alone_is_a_run(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(ROOT / "tests/recorded/run/step_0000020", run / "step_0000020")
    found = read(run)
    assert found.says("its settings are those of the newest checkpoint") and found.says("tread, hidden size ")
    (run / "step_0000020/ema.safetensors").write_bytes(b"short")
    assert read(run).says("is damaged: 5 bytes")


def test_a_killed_run_is_told_from_one_that_runs(run):
    log = RunLog(run)
    log.status("running", 200)
    assert runs.find_run(run).state() == "running"  # by this process
    status = read_json(run / "status.json")
    write_json(run / "status.json", status | {"pid": 2**22 + 1})  # above the most that Linux gives
    when = f"{status['time'][:10]} {status['time'][11:19]} UTC"
    gone = f"killed: process {2**22 + 1} is gone without a word"
    assert read(run).says(f"{gone}; it last wrote at {when}, at step 200 of 300")
    write_json(run / "status.json", status | {"host": "elsewhere"})
    assert runs.find_run(run).state().startswith("running on elsewhere")
    log.status("failed", 200, "the disk is full")
    assert read(run).says("failed – the disk is full, at step 200 of 300")


def test_troubles_are_those_of_the_records_and_starts(tmp_path):
    run = tmp_path / "run"
    write_run(run, [3.0, 2000.0])
    config = read_json(run / "run.json")[1]["config"]
    git = {"versions": {"git": "a" * 40}}
    starts = [{"step": 0, "config": config, "warnings": ["weights of others"], **git}]
    starts += [{"step": 100, "config": config | {"optim": {"lr": 0.5}}, "versions": {"git": "b" * 40}}]
    write_json(run / "run.json", starts)
    add_records(run, *({"step": step, "bad_steps": bad} for step, bad in ((100, 0), (150, 2), (200, 1))))
    said = "\n".join(troubles_of(runs.find_run(run)))
    for text in (
        "3 steps were skipped, since loss or gradient was not finite: between steps 100 and 200",
        "the evaluation loss is 2e+03 at step 200",
        "no held-out data",
        "weights of others",
        "started again at step 100",
        "optim.lr was 1.0, is 0.5 from step 100 on",
        f"commits {'a' * 40}, {'b' * 40}",
    ):
        assert text in said


@pytest.mark.parametrize(
    ("losses", "rises"),
    [
        ([0.5, 0.4, 0.403, 0.404], True),
        ([0.5, 0.4, 0.401, 0.404], False),  # once beyond half a percent
        ([0.5, 0.4, 0.404], False),
        ([0.5, 0.4, 0.3, 0.2], False),
    ],
)
def test_a_heldout_loss_that_rises_is_said(tmp_path, losses, rises):
    write_run(tmp_path / "run", losses)
    said = "the evaluation loss has risen, from 0.4 at step 200 to 0.404 at step 400, as when a network learns its"
    found = [text for text in troubles_of(runs.find_run(tmp_path / "run")) if "risen" in text]
    assert found == [f"{said} training pictures by heart"] * rises


@pytest.mark.parametrize("script", [report, compare_runs])
@pytest.mark.usefixtures("run")
def test_what_can_not_be_is_an_error_in_a_line(tmp_path, monkeypatch, script):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    for word, said in (("", "name at"), ("empty", "empty is no run's"), ("no-*", "names no run"), ("run", "plotly")):
        monkeypatch.setattr(sys, "argv", ["script", *word.split()])
        if script is report or word != "run":
            with pytest.raises(SystemExit, match=f"^error: .*{said}[^\n]*$"):
                script.main()
    assert not list(tmp_path.rglob("*.html"))


def test_text_of_runs_is_text(tmp_path):
    """A browser would run it otherwise; the reference is the number of elements of a run with a tame name."""
    odd = "q [1] ü</script><img src=x onerror=alert(1)>&amp;'\"{{script}}"
    tame, wild = tmp_path / "tame", tmp_path / odd.replace("/", "")
    for folder in (tame, wild):
        write_run(folder, [3.0, 2.0])
        add_picture(folder, 100, 9)
    write_start(tame, warnings=["a"], command=["b"], versions={"git": "c", "torch": "d"})
    write_start(wild, warnings=[odd], command=[odd], versions={"git": odd, "torch": odd})
    assert folders_of([str(wild)]) == [wild]  # not a pattern, for all its brackets
    assert {*folders_of([f"{tmp_path}/*"])} == {tame, wild}
    expected, found = read(tame), read(wild)
    assert found.tags == expected.tags
    assert found.says(odd) and wild.name in found.lines("evaluation loss")


def test_a_page_is_whole_or_not_there(run, monkeypatch):
    read(run)
    before = (run / "report.html").read_bytes()
    monkeypatch.setattr(page.os, "getpid", lambda: 1)
    monkeypatch.setattr("tread.runtime.files.sync", raising(OSError(28, "no space left")))
    with pytest.raises(OSError, match="report.html could not be written"):
        write_report([run])
    assert (run / "report.html").read_bytes() == before and not list(run.glob(".*partial"))


def test_training_ends_with_its_page(tmp_path, monkeypatch):
    text = launch(tmp_path, "report=true", "eval.demo_samples=4", "every.sample=3")
    run = tmp_path / "results/digits-tread"
    assert text.splitlines()[-1].split() == ["report", "results/digits-tread/report.html"]
    found = Reader((run / "report.html").read_text(encoding="utf-8"))
    assert ["state", "finished"] in found.rows and len(found.pictures) == 2
    (line,) = found.lines("evaluation loss").values()
    assert line["y"] == pytest.approx(logged(run, "eval_loss"), rel=1e-5)
    names = [row[0] for row in found.rows]
    assert {"evaluation loss", "drawing samples", "saving checkpoints", "judging samples at the end"} <= set(names)
    (run / "report.html").unlink()
    assert "report.html" not in launch(tmp_path, "report=false") and not (run / "report.html").exists()
    monkeypatch.setattr(train, "write_report", raising(OSError("the disk is full")))
    assert launch(tmp_path, "report=true").splitlines()[-1] == "warning: no report: the disk is full"
    assert RunLog(run).read_status()["state"] == "finished"
