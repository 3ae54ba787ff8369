"""Every example is a complete script of its own that knows nothing of vramfit."""

import ast
import sys
from pathlib import Path

import pytest
from tests import warm

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))

# Prints each script's help after a line with its name, in one interpreter so that torch is imported once.
PRINT_HELP = """
import contextlib, runpy, sys, warnings
warnings.simplefilter("ignore")
for path in sys.argv[1:]:
    print("@@", path, flush=True)
    sys.argv = [path, "--help"]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as stop:
        print("@exit", stop.code, flush=True)
"""


@pytest.fixture(scope="module")
def help_texts() -> dict[str, str]:
    """What each script prints for --help, by file name."""
    done = warm.run(
        [sys.executable, "-c", PRINT_HELP, *map(str, SCRIPTS)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    sections = (section.partition("\n") for section in done.stdout.split("@@ ")[1:])
    return {Path(path).name: text for path, _, text in sections}


def test_the_promised_examples_are_there() -> None:
    names = {script.stem for script in SCRIPTS}
    assert names >= {
        "bert_large_finetune",
        "gan_train",
        "gpt2_train",
        "llama_train",
        "llm_generate",
        "lstm_lm",
        "resnet_train",
        "unet3d_segmentation",
        "vit_inference",
    }


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
class TestScript:
    def test_knows_nothing_of_vramfit(self, script: Path) -> None:
        assert "vramfit" not in script.read_text(encoding="utf-8").lower()

    def test_imports_only_what_its_users_have(self, script: Path) -> None:
        tree = ast.parse(script.read_text(encoding="utf-8"))
        imported = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, "a script on its own has no relative imports"
                imported.add((node.module or "").partition(".")[0])
        assert imported - set(sys.stdlib_module_names) <= {"torch", "numpy", "PIL", "transformers", "monai"}

    def test_is_written_for_cuda_alone(self, script: Path) -> None:
        source = script.read_text(encoding="utf-8")
        names = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
        assert "cuda" in names or "cuda:0" in names
        assert "cpu" not in names
        assert "cuda.is_available" not in source

    def test_runs_by_itself_and_says_what_it_takes(self, script: Path, help_texts: dict[str, str]) -> None:
        text = help_texts[script.name]
        assert text.endswith("@exit 0\n")
        assert f"usage: {script.name}" in text
        assert "--batch-size" in text
        assert "--seed" in text
