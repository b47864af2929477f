"""A person's wav file and an exported keyword model: what is heard, and what is refused."""

from __future__ import annotations

import builtins
import json
import struct
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from splitgrow.cli import app
from splitgrow.errors import InputError
from splitgrow.export.onnx_file import set_metadata
from splitgrow.listen import Keywords, Spotter, read_clip, read_clips, wav
from splitgrow.listen.clip import loudest_second, resampled
from splitgrow.listen.keywords import KEY
from splitgrow.paper import job_runs, kws_kept
from splitgrow.paper.kws import Job, order
from splitgrow.paper.kws_bench import Bench, Setting, build
from splitgrow.paper.speech import LogMel, Mfcc, encode, scaled
from splitgrow.paper.speech_parts import CLASSES
from test_paper_kws import clips as made_up

needs_onnx = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("onnx", "onnxruntime", "onnxscript")),
    reason="needs splitgrow[export]",
)
KEYWORDS = Keywords(CLASSES, tuple(range(-5, 5)), (2.0,) * 10)


def write(
    path: Path,
    samples: Any = None,
    rate: int = 16_000,
    *,
    kind: int = 1,
    bits: int = 16,
    channels: int = 1,
    extra: bytes = b"",
    size: int | None = None,
) -> Path:
    """A wav file, byte by byte; ``extra`` follows the format, ``size`` is told of the samples."""
    data = np.asarray(noise() if samples is None else samples).astype("<i2").tobytes()
    align = channels * bits // 8
    fmt = struct.pack("<HHIIHH", kind, channels, rate, rate * align, align, bits) + extra
    body = b"WAVEfmt " + struct.pack("<I", len(fmt)) + fmt
    body += b"LIST" + struct.pack("<I", 3) + b"abc\0"  # an odd size is filled up
    body += b"data" + struct.pack("<I", len(data) if size is None else size) + data
    path.write_bytes(b"RIFF" + struct.pack("<I", len(body)) + body)
    return path


def noise(count: int = 16_000, loud: int = 1_000, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(-loud, loud, count)


def tone(hertz: float, rate: int, seconds: float = 1.0) -> Tensor:
    time = torch.arange(round(rate * seconds)).double() / rate
    return (0.5 * torch.sin(2 * torch.pi * hertz * time)).float()


# --- wav files ----------------------------------------------------------------------------


def test_a_second_at_16_khz_is_taken_as_it_is(tmp_path: Path) -> None:
    samples = noise()
    clip = read_clip(write(tmp_path / "a.wav", samples))
    assert torch.equal(clip.wave, scaled(torch.tensor(samples).to(torch.int16)))
    assert (clip.seconds, clip.start) == (1, 0)


def test_a_short_clip_is_filled_up_at_its_end(tmp_path: Path) -> None:
    clip = read_clip(write(tmp_path / "a.wav", noise(6_000)))
    assert clip.wave.shape == (16_000,)
    assert clip.wave[:6_000].any()
    assert not clip.wave[6_000:].any()
    assert clip.seconds == 0.375


def test_of_a_long_clip_the_loudest_second_is_taken_with_the_word_in_its_middle(
    tmp_path: Path,
) -> None:
    samples = noise(64_000, 20)
    samples[40_000:48_000] = noise(8_000, 9_000)
    clip = read_clip(write(tmp_path / "a.wav", samples))
    assert clip.seconds == 4
    assert clip.start == pytest.approx(2.25, abs=0.05)  # the word is from 2.5 to 3 s
    first = round(clip.start * 16_000)
    assert torch.equal(
        clip.wave, scaled(torch.tensor(samples[first : first + 16_000]).to(torch.int16))
    )


def test_silence_of_any_length_has_a_second() -> None:
    assert 0 <= loudest_second(torch.zeros(40_001), 16_000) <= 24_001
    assert loudest_second(torch.zeros(5), 16_000) == 0


def test_channels_are_averaged(tmp_path: Path) -> None:
    left, right = noise(seed=1), noise(seed=2)
    clip = read_clip(write(tmp_path / "a.wav", np.stack([left, right], 1), channels=2))
    wanted = (torch.tensor(left) + torch.tensor(right)).double() / 2 / 32768
    torch.testing.assert_close(clip.wave.double(), wanted)


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 44_101, 48_000, 96_000])
def test_a_tone_stays_the_same_tone_at_another_rate(rate: int) -> None:
    found = resampled(tone(1_234.5, rate, 1.5), rate)
    assert found.shape == (16_000,)
    inner = slice(500, -500) if rate > 16_000 else slice(600, -600)
    assert (found - tone(1_234.5, 16_000))[inner].abs().max() < 2e-4
    later = resampled(tone(1_234.5, rate, 1.5), rate, rate // 4)
    exact = torch.arange(16_000).double() / 16_000 + (rate // 4) / rate
    wanted = 0.5 * torch.sin(2 * torch.pi * 1_234.5 * exact)
    assert (later.double() - wanted)[: 16_000 - 600].abs().max() < 2e-4  # from the first on


def test_what_16_khz_cannot_have_is_taken_out_and_the_bands_stay() -> None:
    assert resampled(tone(8_100, 48_000), 48_000)[500:-500].abs().max() < 1e-4  # 74 dB below
    kept = resampled(tone(7_600, 48_000), 48_000)[500:-500]
    assert kept.abs().max() == pytest.approx(0.5, rel=2e-3)


def test_a_short_clip_at_another_rate_is_filled_up_too(tmp_path: Path) -> None:
    clip = read_clip(write(tmp_path / "a.wav", noise(24_000), 48_000))
    assert clip.wave.shape == (16_000,)
    assert not clip.wave[8_000:].any()


def test_extensible_and_streamed_files_are_read(tmp_path: Path) -> None:
    wide = struct.pack("<HHIH", 22, 16, 4, 1) + bytes(14)
    found = read_clip(write(tmp_path / "a.wav", kind=0xFFFE, extra=wide))
    streamed = read_clip(write(tmp_path / "b.wav", size=0xFFFFFFFF))
    assert torch.equal(found.wave, streamed.wave)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"bits": 8}, "expected 16-bit PCM, got 8-bit PCM. Convert it: ffmpeg -i "),
        ({"bits": 24}, "my sounds/a.wav' -ac 1 -ar 16000 -c:a pcm_s16le '"),
        ({"bits": 24}, "my sounds/a-16k.wav'"),
        ({"bits": 32, "kind": 3}, "got 32-bit float. Convert it"),
        ({"bits": 8, "kind": 7}, "got 8-bit mu-law. Convert it"),
        ({"kind": 85}, "got 16-bit samples of kind 85. Convert it"),
        ({"rate": 4_000}, "expected one channel or more at 8000 to 192000 Hz, got 1 at 4000 Hz"),
        ({"channels": 0}, "got 0 at 16000 Hz"),
        ({"samples": []}, "is empty: it has no samples. Record it again"),
        ({"size": 40_000}, "was cut off: it should have 40000 bytes of samples, and has 32000"),
    ],
)
def test_a_file_of_another_kind_is_refused(
    tmp_path: Path, made: dict[str, Any], message: str
) -> None:
    (tmp_path / "my sounds").mkdir()
    path = write(tmp_path / "my sounds" / "a.wav", **made)
    with pytest.raises(InputError) as caught:
        read_clip(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty: it has 0 bytes. Record or copy it again"),
        (b"ID3 some music", "is not a wav file: it does not begin with RIFF and WAVE. Convert"),
        (b"RIFF\0\0\0\0WAVE", "is damaged: .* lacks 'fmt ' and 'data'"),
        (b"RIFF\0\0\0\0WAVEfmt \2\0\0\0ab" + b"data\0\0\0\0", "lacks half of the first"),
    ],
)
def test_what_is_not_a_wav_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_clip(path)


def test_missing_files_folders_and_very_large_ones_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=r"none\.wav cannot be read: No such file"):
        read_clip(tmp_path / "none.wav")
    with pytest.raises(InputError, match=r"is a folder\. Name all wav files in it: /.*/\*\.wav$"):
        read_clip(tmp_path)
    monkeypatch.setattr(wav, "LARGEST", 1_000)
    with pytest.raises(InputError, match="Cut out the part that matters"):
        read_clip(write(tmp_path / "a.wav"))


def test_a_folder_is_told_with_words_for_a_shell(tmp_path: Path) -> None:
    folder = tmp_path / "my sounds"
    folder.mkdir()
    with pytest.raises(InputError, match=r"in it: '/.*/my sounds'/\*\.wav$"):
        read_clip(folder)


def test_a_clip_knows_the_rate_of_its_file(tmp_path: Path) -> None:
    assert read_clip(write(tmp_path / "a.wav", noise(8_000), 8_000)).rate == 8_000
    assert read_clip(write(tmp_path / "b.wav")).rate == 16_000


def test_every_bad_file_is_named(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.wav", bits=8), write(tmp_path / "b.wav"), tmp_path / "c.wav"]
    with pytest.raises(InputError) as caught:
        read_clips(paths)
    text = str(caught.value)
    assert "a.wav: expected 16-bit" in text
    assert "c.wav cannot be read" in text
    assert "b.wav" not in text


# --- models -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    return build("DS-CNN", "seed", 4).eval()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, net: nn.Module) -> Path:
    from splitgrow.export import export_onnx

    path = tmp_path_factory.mktemp("model") / "m.onnx"
    export_onnx(net, torch.randn(2, 1, 49, 10), path, metadata=KEYWORDS.to_metadata())
    return path


def test_keywords_travel_as_metadata() -> None:
    odd = Keywords(CLASSES, tuple(torch.rand(10).tolist()), tuple(torch.rand(10).tolist()))
    assert Keywords.from_metadata(odd.to_metadata(), "m.onnx") == odd


def test_inputs_are_those_of_training() -> None:
    waves = scaled(torch.tensor(noise(32_000)).to(torch.int16)).view(2, -1)
    codes = encode(LogMel()(waves))
    wanted = Mfcc(torch.tensor(KEYWORDS.mean), torch.tensor(KEYWORDS.std))(codes * 0.5 - 80)
    assert torch.equal(KEYWORDS.inputs(waves), wanted)


@needs_onnx
def test_what_is_heard_is_what_the_net_says(tmp_path: Path, model: Path, net: nn.Module) -> None:
    paths = [write(tmp_path / f"{i}.wav", noise(loud=30 * 4**i, seed=i)) for i in range(5)]
    clips = read_clips(paths)
    heard = Spotter(model).hear(clips)
    with torch.no_grad():
        wanted = net(KEYWORDS.inputs(torch.stack([clip.wave for clip in clips]))).softmax(1)
    found = torch.tensor([[each.probabilities[name] for name in CLASSES] for each in heard])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert [each.best(1)[0][0] for each in heard] == [CLASSES[i] for i in wanted.argmax(1)]
    assert Spotter(model).hear([]) == []


def changed(**values: Any) -> dict[str, str]:
    return {KEY: json.dumps(json.loads(KEYWORDS.to_metadata()[KEY]) | values)}


@needs_onnx
@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "is not a keyword model: its metadata has no splitgrow.keywords"),
        ({"other": "text"}, "is not a keyword model"),
        ({KEY: "{"}, "cannot be read (JSONDecodeError"),
        ({KEY: "{}"}, "cannot be read (KeyError"),
        (changed(mean=[0.0]), "should have names of classes and 10 means"),
        (changed(std=[0.0] * 10), "should have names of classes and 10 means"),
        (changed(classes=[]), "should have names of classes"),
        (changed(classes=["yes", "no"]), "expected outputs of shape [(1, 2)]"),
        (changed(**{"front end": {"rate": 8_000}}), "another front end (version: None there"),
    ],
)
def test_a_model_that_does_not_say_what_it_hears_is_refused(
    tmp_path: Path, model: Path, metadata: dict[str, str], message: str
) -> None:
    import onnx

    other = onnx.load(model)
    set_metadata(other, metadata)
    onnx.save(other, tmp_path / "m.onnx")
    refused(tmp_path / "m.onnx", message)


def refused(path: Path, message: str) -> None:
    with pytest.raises(InputError) as caught:
        Spotter(path)
    text = str(caught.value)
    assert text.startswith(str(path))
    assert message in text
    assert "splitgrow export RUN_DIR --format onnx" in text


@needs_onnx
def test_files_that_are_no_such_model_are_refused(tmp_path: Path) -> None:
    refused(tmp_path / "none.onnx", "there is no such file")
    (tmp_path / "text.onnx").write_text("hello")
    refused(tmp_path / "text.onnx", "text.onnx is not an ONNX file. ")
    (tmp_path / "model.pte").write_bytes(b"8\0\0\0ET12 and more")
    refused(tmp_path / "model.pte", "is an ExecuTorch program, and this command runs ONNX files")
    with pytest.raises(InputError, match=r"is a folder\. Name the ONNX file in it: .*model\.onnx"):
        Spotter(tmp_path)
    from splitgrow.export import export_onnx

    path = tmp_path / "linear.onnx"
    export_onnx(nn.Linear(3, 12), torch.randn(2, 3), path, metadata=KEYWORDS.to_metadata())
    refused(path, "does not run on MFCCs of shape (1, 1, 49, 10)")


def test_a_missing_onnxruntime_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("onnxruntime"):
            raise ModuleNotFoundError("No module named 'onnxruntime'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match=r'onnxruntime.*pip install "splitgrow\[export\]"'):
        Spotter(tmp_path / "m.onnx")


# --- the command --------------------------------------------------------------------------


def invoke(*words: object) -> Any:
    return CliRunner().invoke(app, ["listen", *map(str, words)])


@needs_onnx
def test_the_command_prints_a_table(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    write(tmp_path / "[b]long.wav", noise(40_000))
    write(tmp_path / "short.wav", noise(8_000))
    outcome = invoke(model, tmp_path / "[b]long.wav", tmp_path / "short.wav", "--top", 2)
    assert outcome.exit_code == 0, outcome.output
    assert "[b]long.wav" in outcome.output  # a name is not markup
    assert "of 2.50 s" in outcome.output
    assert "0.50 s" in outcome.output
    assert "filled up with silence" in outcome.output
    assert "the loudest one" in outcome.output
    assert outcome.output.count("%") == 4
    alone = invoke(model, write(tmp_path / "a.wav"))
    assert "second" not in alone.output
    assert alone.output.count("%") == 3


@needs_onnx
def test_names_of_clips_stay_in_one_line(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    paths = [tmp_path / "a" / "sisters" / "eo44_nohash_1.wav", tmp_path / "b" / "2.wav"]
    for path in paths:
        path.parent.mkdir(parents=True)
        write(path, noise(400_000))
    outcome = invoke(model, *paths)
    for path in paths:
        assert str(path.relative_to(tmp_path)) in outcome.output
    assert outcome.output.count("%") == 6  # nothing was cut
    assert "…" not in outcome.output


@needs_onnx
def test_the_command_speaks_json(tmp_path: Path, model: Path) -> None:
    path = write(tmp_path / "a.wav", noise(20_000))
    outcome = invoke(model, path, "--json")
    (row,) = json.loads(outcome.output)
    assert (row["clip"], row["seconds"]) == (str(path), 1.25)
    assert set(row["probabilities"]) == set(CLASSES)
    assert sum(row["probabilities"].values()) == pytest.approx(1)
    assert row["word"] == max(row["probabilities"], key=row["probabilities"].get)


@needs_onnx
@pytest.mark.parametrize("words", [(), ("--json",)])
def test_good_clips_are_heard_beside_bad_ones(
    tmp_path: Path, model: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    paths = [write(tmp_path / "a.wav", bits=8), write(tmp_path / "b.wav"), tmp_path / "c.wav"]
    outcome = invoke(model, *paths, *words)
    assert outcome.exit_code == 1
    assert "b.wav" in outcome.stdout
    assert "a.wav" not in outcome.stdout
    assert [line.split(" ")[0] for line in str(outcome.exception).splitlines()] == [
        f"{paths[0]}:", str(paths[2])
    ]  # fmt: skip
    if words:
        (row,) = json.loads(outcome.stdout)
        assert row["clip"] == str(paths[1])
    none = invoke(model, tmp_path / "c.wav", *words)
    assert (none.exit_code, none.stdout) == (1, "")


@needs_onnx
def test_clips_of_a_low_rate_have_a_note(tmp_path: Path, model: Path) -> None:
    low = [write(tmp_path / f"{i}.wav", noise(8_000), 8_000) for i in range(4)]
    outcome = invoke(model, low[0], write(tmp_path / "b.wav"), "--json")
    assert outcome.exit_code == 0
    assert len(json.loads(outcome.stdout)) == 2
    assert outcome.stderr == (
        f"splitgrow: {low[0]}: recorded at 8 kHz, so what is above 4 kHz is missing, and words are "
        "often misheard. Record at 16 kHz or more.\n"
    )
    many = invoke(model, *low, write(tmp_path / "c.wav", noise(11_025), 11_025)).stderr
    assert f"{low[2]} and 2 more: recorded at 8 or 11.025 kHz, so what is above 4 kHz" in many
    assert many.count("\n") == 1
    assert invoke(model, write(tmp_path / "d.wav", noise(48_000), 48_000)).stderr == ""


@needs_onnx
def test_the_command_refuses_what_it_cannot_use(tmp_path: Path, model: Path) -> None:
    assert "cannot be read" in str(invoke(model, tmp_path / "none.wav").exception)
    assert "no such file" in str(invoke(tmp_path / "m.onnx", write(tmp_path / "a.wav")).exception)
    assert invoke(model).exit_code == 2


# --- from the study to the ear ------------------------------------------------------------

TINY = Setting(
    epochs=1, steps=3, full_phases=1, batch=16, rate=0.01, scored=32, scored_batch=16, width=4,
    phases=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a grown net, as the study leaves it."""
    folder = tmp_path_factory.mktemp("study")
    made = order(TINY, data=folder, folder=folder, device="cpu", read=made_up)
    job = Job("DS-CNN", "splitting")
    job_runs.run_job(job, made)
    return job_runs.runs_of(TINY, folder) / job.name


def in_batches(values: Sequence[Any]) -> Tensor:
    return torch.cat([each[0] for each in values])


@needs_onnx
def test_a_run_of_the_study_is_exported_and_listened_to(run: Path, tmp_path: Path) -> None:
    outcome = CliRunner().invoke(app, ["export", str(run), "--format", "onnx", "--int8"])
    assert outcome.exit_code == 0, outcome.output
    assert "test accuracy" in outcome.output
    path = write(tmp_path / "a.wav")
    bench = Bench(TINY, made_up(), torch.device("cpu"))
    for name in ("model.onnx", "model.int8.onnx"):
        spotter = Spotter(run / name)
        assert spotter.keywords.classes == CLASSES
        assert torch.equal(torch.tensor(spotter.keywords.mean), bench.mfcc.mean)
        assert invoke(run / name, path).exit_code == 0


def test_what_is_kept_is_what_the_bench_has(run: Path) -> None:
    bench = Bench(TINY, made_up(), torch.device("cpu"))
    found = kws_kept.experiment(run)
    assert torch.equal(in_batches(list(found.batches)), in_batches(bench.scored))
    torch.manual_seed(1)
    net = build("DS-CNN", "seed", 4).eval()
    assert found.evaluate is not None
    assert found.evaluate(net) == {"test accuracy": bench.metrics(net)["accuracy"]}


def test_a_run_without_its_clips_is_explained(run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"splitgrow paper kws, .*clips\.safetensors cannot be"):
        kws_kept.experiment(tmp_path / run.name)
