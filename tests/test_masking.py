"""What is masked in a command line and in a text, and what is not."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

import vramfit
from vramfit.masking import mask_arguments, mask_text

# Forms of keys, of no account: joined here, so that no scanner takes this file for a leak.
HUGGING_FACE = "hf_" + "aBcDeFgHiJ" * 3 + "kLmN"
OPENAI = "sk-" + "proj-" + "a1B2c3D4" * 5
GITHUB = "ghp_" + "a1B2c3D4" * 4 + "e5F6"
AWS = "AKIA" + "IOSFODNN7EXAMPLE"
WANDB = "0123456789abcdef" * 2 + "01234567"
JWT = "eyJ" + "hbGciOiJIUzI1NiJ9." + "eyJzdWIiOiIxIn0." + "c2lnbmF0dXJl"
SECRETS = (HUGGING_FACE, OPENAI, GITHUB, AWS, WANDB, JWT, "hunter2", "hf_abc")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--token", "hf_abc"], ["--token", "***"]),
        (["--hf_token", "x"], ["--hf_token", "***"]),
        (["--hfToken=x"], ["--hfToken=***"]),
        (["--api-key=hunter2"], ["--api-key=***"]),
        (["--api_key", "hunter2"], ["--api_key", "***"]),
        (["--password", "hunter2", "--epochs", "3"], ["--password", "***", "--epochs", "3"]),
        (["--wandb-key", "hunter2"], ["--wandb-key", "***"]),
        (["--aws-secret-access-key", "hunter2"], ["--aws-secret-access-key", "***"]),
        (["+logger.wandb.api_key=hunter2"], ["+logger.wandb.api_key=***"]),
        (["WANDB_API_KEY=hunter2"], ["WANDB_API_KEY=***"]),
        ([HUGGING_FACE], ["hf_***"]),
        ([f"model={HUGGING_FACE}"], ["model=hf_***"]),
        ([OPENAI, GITHUB, AWS, JWT], ["sk-***", "ghp_***", "AKIA***", "eyJ***"]),
        ([WANDB], ["***"]),
        (["--run", WANDB], ["--run", "***"]),
        (["https://me:hunter2@host/x"], ["https://***@host/x"]),
        (["--db", "postgres://me:hunter2@host:5432/x"], ["--db", "postgres://***@host:5432/x"]),
        (["https://host/x?token=hunter2&n=1"], ["https://host/x?token=***&n=1"]),
        (["--header", "Authorization: Bearer hunter2hunter2"], ["--header", "Authorization: *** ***"]),
        (['{"token": "hunter2", "n": 1}'], ['{"token": "***", "n": 1}']),
        (["--token", "--password", "hunter2"], ["--token", "--password", "***"]),
    ],
)
def test_secrets_are_masked(given: list[str], told: list[str]) -> None:
    assert mask_arguments(["train.py", *given]) == ("train.py", *told)
    assert mask_arguments(mask_arguments(given)) == tuple(told), "what is masked stays as it is"


@pytest.mark.parametrize(
    "given",
    [
        ["--max-tokens", "4096"],
        ["--tokenizer", "gpt2"],
        ["--token-limit", "5"],
        ["--pad-token", "<pad>"],
        ["--mask_token=[MASK]"],
        ["--bytes-per-token", "2"],
        ["--image-key", "pixel_values"],
        ["--author", "me"],
        ["--use-auth-token", "--epochs", "3"],
        ["--revision", WANDB],
        [f"--commit={WANDB}"],
        [f"/cache/snapshots/{WANDB}/model.safetensors"],
        ["hf_transformersexamplescript.py"],
        ["sk-learn-pipeline-training"],
        ["ssh://git@host/x.git"],
        ["https://host/a@b"],
        ["--password", ""],
        ["-x", "y", "-"],
    ],
)
def test_what_is_no_secret_stays(given: list[str]) -> None:
    assert mask_arguments(["train.py", *given]) == ("train.py", *given)


def test_texts() -> None:
    told = mask_text(f"401 for https://me:hunter2@host with {GITHUB} (password='hunter2', epochs=3)")
    assert told == "401 for https://***@host with ghp_*** (password='***', epochs=3)"
    plain = "KeyError: 'token' at line 3: shape (4, 5); key=3"
    assert mask_text(plain) == plain


@pytest.mark.parametrize(
    "piece",
    [
        "a",
        "a-",
        "a=",
        "a: ",
        "a=a",
        "--a ",
        "a.b/",
        "://",
        "a://",
        "hf_",
        "hf_a",
        "sk-",
        "sk-a",
        "eyJ-",
        "Basic ",
        "_",
    ],
)
def test_long_texts_take_time_by_their_length(piece: str) -> None:
    def seconds(length: int) -> float:
        text = piece * (length // len(piece))
        start = time.process_time()
        mask_text(text)
        return time.process_time() - start

    assert seconds(200_000) < 2.0, "by the square of it, it would be minutes"


def test_no_file_of_a_run_holds_a_secret(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch\ntorch.ones(9, device='cuda')\nraise OSError('no ' + ' '.join(sys.argv[1:]))\n"
    )
    report = vramfit.run(
        script,
        "--token",
        "hf_abc",
        "--api-key=hunter2",
        HUGGING_FACE,
        f"k={WANDB}",
        JWT,
        gpu="24GiB",
        cwd=tmp_path,
    )
    assert report.run.error is not None and report.run.error.startswith("OSError: no --token")
    for name in ("page.html", "run.json", "run.vft", "run.pickle", "run.perfetto.json"):
        report.save(tmp_path / name)
        data = (tmp_path / name).read_bytes()
        assert not [secret for secret in SECRETS if secret.encode() in data], name
    told = json.loads((tmp_path / "run.json").read_text())
    assert told["program"][1:] == ["--token", "***", "--api-key=***", "hf_***", "k=***", "eyJ***"]
    assert not [secret for secret in SECRETS if secret in str(report)]
