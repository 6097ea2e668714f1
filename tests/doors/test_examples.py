"""The notebooks in examples/: what is stored is whole and small, and they run from another folder to results that hold.
References: the links' files, and what must be so for any digits (a guided one is likelier to show its class)."""

import json
import re

import pytest
from conftest import ROOT

PATHS = sorted((ROOT / "examples").glob("*.ipynb"))
TOLD = {  # name → what to print at the end, and whether that makes sense
    "sample_and_guide": (
        "[none[1], measured['cfg'][1.5][1], change_without_each_block(dense), change_without_each_block(routed)]",
        lambda none, cfg, dense, routed: 0.8 < none < cfg and min(dense) > 2 * max(routed[2:9]),
    ),
    "routes_in_your_model": (
        "[inside, [losses[-1][2] for losses in curves.values()], ratio]",
        lambda inside, losses, ratio: inside[2:7] == [32] * 5 and max(losses) < 0.6 and ratio < 0.95,
    ),
}


def codes(notebook: dict) -> list[dict]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def kinds(cell: dict) -> list[str]:
    """What a cell shows: pictures, values and printed text, in pieces or as one."""
    shown = (f"{output['output_type']} {'image/png' in output.get('data', ())}" for output in cell["outputs"])
    return list(dict.fromkeys(shown))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_what_is_stored_is_whole_and_small(path):
    notebook = json.loads(path.read_text())
    assert path.stat().st_size <= 300_000 and path.stem in TOLD
    assert [cell["execution_count"] for cell in codes(notebook)] == [*range(1, len(codes(notebook)) + 1)]
    assert not [o for cell in codes(notebook) for o in cell["outputs"] if "stderr" in o.values() or "ename" in o]
    told = "".join(line for cell in notebook["cells"] for line in cell["source"])
    assert all((path.parent / link).exists() for link in re.findall(r"\]\(([^)]+)\)", told))


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_runs_in_any_folder(path, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="pip install -r requirements-notebooks.txt")
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    question, makes_sense = TOLD[path.stem]
    ran = nbformat.read(path, as_version=4)
    ran.cells.append(nbformat.v4.new_code_cell(f"import json; print(json.dumps({question}))"))
    nbclient.NotebookClient(ran, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    *cells, last = codes(ran)
    assert [kinds(cell) for cell in cells] == [kinds(cell) for cell in codes(json.loads(path.read_text()))]
    assert makes_sense(*json.loads(last["outputs"][0]["text"])), last["outputs"]
