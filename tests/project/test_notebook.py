"""horoplug.run in a notebook: examples/notebook.ipynb runs unchanged, and an interrupted cell ends its job."""

import contextlib
import os
import uuid

import psutil
import pytest

from tests.harness import OPTIONAL, ROOT
from tests.harness.limits import scaled
from tests.harness.support import environment, until

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

MARK = "HOROPLUG_TEST_NOTEBOOK"


@pytest.fixture
def variables(tmp_path, monkeypatch):
    """The environment of the notebook kernels of this test. Checks that no process of the test is left."""
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    mark = uuid.uuid4().hex
    yield environment() | {MARK: mark, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, OPTIONAL)))}

    def left():
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == mark:
                    return True
        return False

    until(lambda: not left())


def streams(cell, name):
    return "".join(output.text for output in cell.outputs if output.get("name") == name)


def test_example_notebook_runs(variables, tmp_path):
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is kept without outputs"
    client = nbclient.NotebookClient(
        notebook, timeout=100, resources={"metadata": {"path": tmp_path}}
    )
    client.execute(env=variables)
    run, plot, error = [cell for cell in notebook.cells if cell.cell_type == "code"][-3:]
    lines = streams(run, "stdout").splitlines()
    assert [line.split(": loss")[0] for line in lines] == [
        f"[0]<stdout>:epoch {n}" for n in range(1, 5)
    ]
    losses = [float(line.split()[-1]) for line in lines]
    assert losses[-1] < losses[0] - 0.2
    (returned,) = [output for output in run.outputs if output.output_type == "execute_result"]
    both = eval(returned.data["text/plain"])
    assert both[0] == both[1] == pytest.approx(losses, abs=0.001)
    assert any("image/png" in output.get("data", {}) for output in plot.outputs)
    text = streams(error, "stdout")
    assert text.startswith("rank 1: ZeroDivisionError: division by zero\n\nTraceback ")
    assert "The exception itself: ZeroDivisionError('division by zero')" in text


FOREVER = """
import horoplug, os, signal
def work():
    print("ready", flush=True)
    while True:
        signal.pause()
horoplug.run(work, num_proc=2)
"""


def test_interrupted_cell_ends_the_job(variables, tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(FOREVER)])

    class Client(nbclient.NotebookClient):
        """Interrupts the cell once the output of both ranks has appeared, which happens while the cell runs."""

        def process_message(self, msg, cell, cell_index):
            output = super().process_message(msg, cell, cell_index)
            if streams(cell, "stdout").count("ready") == 2 and not interrupted:
                interrupted.append(True)
                os.kill(self.km.provisioner.pid, 2)
            return output

    interrupted = []
    client = Client(notebook, timeout=round(scaled(60)), resources={"metadata": {"path": tmp_path}})
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="KeyboardInterrupt"):
        client.execute(env=variables)
    assert interrupted
