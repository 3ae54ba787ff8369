import sysconfig
from pathlib import Path

import pytest

from vramfit.analysis import Origin, origin, short_location, user_frame
from vramfit.trace import Frame

SITE = "/home/ada/.venv/lib/python3.11/site-packages"


@pytest.mark.parametrize(
    ("filename", "expected"),
    [
        ("/home/ada/project/train.py", Origin.USER),
        ("train.py", Origin.USER),
        (r"C:\Users\ada\project\train.py", Origin.USER),
        ("<stdin>", Origin.USER),
        ("<ipython-input-3-abc>", Origin.USER),
        ("/tmp/ipykernel_4242/1234567.py", Origin.USER),
        ("/home/ada/project/.venv/notes.py", Origin.USER),
        (f"{SITE}/transformers/trainer.py", Origin.LIBRARY),
        ("/usr/lib/python3/dist-packages/monai/networks/unet.py", Origin.LIBRARY),
        (r"C:\venv\Lib\site-packages\timm\models\vit.py", Origin.LIBRARY),
        (f"{SITE}/torch/nn/modules/module.py", Origin.RUNTIME),
        (f"{SITE}/vramfit/virtual/meter.py", Origin.RUNTIME),
        ("/home/bob/pytorch/torch/nn/modules/linear.py", Origin.RUNTIME),
        ("/opt/conda/lib/python3.10/contextlib.py", Origin.RUNTIME),
        ("/usr/lib64/python3.12/threading.py", Origin.RUNTIME),
        ("<frozen runpy>", Origin.RUNTIME),
        ("<string>", Origin.RUNTIME),
        ("??", Origin.RUNTIME),
        ("", Origin.RUNTIME),
        ("/home/ada/kernel.cpp", Origin.RUNTIME),
    ],
)
def test_origin_follows_from_the_file_name(filename: str, expected: Origin) -> None:
    assert origin(filename) is expected


def test_this_interpreter_and_vramfit_itself_are_runtime() -> None:
    assert origin(sysconfig.get_path("stdlib") + "/runpy.py") is Origin.RUNTIME
    import vramfit.analysis

    assert origin(str(Path(vramfit.analysis.__file__))) is Origin.RUNTIME


def test_the_users_line_is_found_between_frameworks() -> None:
    stack = (
        Frame(f"{SITE}/torch/nn/functional.py", 10, "linear"),
        Frame(f"{SITE}/peft/lora.py", 20, "forward"),
        Frame("/home/ada/nets/block.py", 30, "forward"),
        Frame(f"{SITE}/transformers/trainer.py", 40, "train"),
        Frame("/home/ada/train.py", 50, "main"),
    )
    assert user_frame(stack) == stack[2]


def test_a_program_that_is_a_package_has_the_lines_of_that_package() -> None:
    stack = (
        Frame(f"{SITE}/torch/nn/functional.py", 10, "linear"),
        Frame(f"{SITE}/peft/lora.py", 20, "forward"),
        Frame("<frozen runpy>", 88, "_run_code"),
    )
    assert user_frame(stack) == stack[1]


def test_no_line_is_invented() -> None:
    assert user_frame(()) is None
    assert user_frame((Frame(f"{SITE}/torch/nn/functional.py", 10, "linear"),)) is None


def test_locations_are_relative_to_the_users_folder() -> None:
    frame = Frame("/home/ada/project/nets/gpt.py", 7, "forward")
    assert short_location(frame, root=Path("/home/ada/project")) == "nets/gpt.py:7"
    assert short_location(frame, root=Path("/home/ada/other")) == "nets/gpt.py:7"
    assert short_location(frame) == "nets/gpt.py:7"
    assert short_location(Frame("train.py", 3, "main")) == "train.py:3"
    assert short_location(None) == ""
