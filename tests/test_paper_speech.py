"""Speech: the front end against its definition, both sources, the cache, and random changes.

All waveforms are made here. The front end's reference is written from the definition, in numpy and
float64, and shares nothing with the code under test.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import shutil
import wave
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from splitgrow.errors import InputError
from splitgrow.paper import speech, speech_data, speech_folder, speech_packed, speech_parts
from splitgrow.paper.speech_parts import CLASSES, KEYWORDS, Part, SpeechData, SpeechPart

TIME = np.arange(16_000) / 16_000


# --- the definition -----------------------------------------------------------------------


def reference_bands() -> np.ndarray:
    def mel(hertz: float) -> float:
        return 2595 * math.log10(1 + hertz / 700)

    corners = [
        700 * (10 ** ((mel(20) + (mel(7600) - mel(20)) * i / 41) / 2595) - 1) for i in range(42)
    ]
    bands = np.zeros((513, 40))
    for band in range(40):
        left, middle, right = corners[band : band + 3]
        for k in range(513):
            hertz = k * 16_000 / 1024
            if left < hertz <= middle:
                bands[k, band] = (hertz - left) / (middle - left)
            elif middle < hertz < right:
                bands[k, band] = (right - hertz) / (right - middle)
    return bands


BANDS = reference_bands()


def reference_features(samples: np.ndarray) -> np.ndarray:
    """(49, 40) dB of 16-bit samples."""
    clip = np.zeros(16_000)
    clip[: min(len(samples), 16_000)] = samples[:16_000] / 32768
    n = np.arange(640)
    window = 0.5 - 0.5 * np.cos(2 * np.pi * n / 640)
    waves = np.exp(-2j * np.pi * np.outer(n, np.arange(513)) / 1024)
    frames = np.stack([clip[320 * i : 320 * i + 640] * window for i in range(49)])
    power = np.abs(frames @ waves) ** 2
    return 10 * np.log10(power @ BANDS + 1e-8)


def reference_mfcc(features: np.ndarray) -> np.ndarray:
    """(49, 10): an orthonormal DCT-II of each frame."""
    rows = []
    for k in range(10):
        size = math.sqrt((1 if k == 0 else 2) / 40)
        rows.append([size * math.cos(math.pi * k * (2 * b + 1) / 80) for b in range(40)])
    return features @ np.array(rows).T


def pcm(values: np.ndarray) -> np.ndarray:
    return np.clip(np.round(values * 32768), -32768, 32767).astype(np.int16)


def noise(seed: int, length: int = 16_000, size: float = 0.1) -> np.ndarray:
    return pcm(size * np.random.default_rng(seed).standard_normal(length))


def waveforms() -> dict[str, np.ndarray]:
    chirp = np.sin(2 * np.pi * (50 * TIME + 3_900 * TIME**2))
    impulse = np.zeros(16_000)
    impulse[[3_333, 15_999]] = 1
    return {
        "sine": pcm(0.5 * np.sin(2 * np.pi * 440 * TIME)),
        "quiet sine": pcm(0.001 * np.sin(2 * np.pi * 3_000 * TIME)),
        "square": pcm(np.sign(np.sin(2 * np.pi * 1_000 * TIME))),
        "chirp": pcm(0.8 * chirp),
        "noise": noise(0),
        "faint noise": noise(1, size=1e-4),
        "impulses": pcm(impulse),
        "short": noise(2, length=7_001),
        "long": noise(3, length=20_000),
        "nothing": np.zeros(16_000, np.int16),
    }


def to_waves(samples: np.ndarray) -> Tensor:
    return speech.scaled(torch.from_numpy(samples)).unsqueeze(0)


# --- the front end ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", waveforms())
def test_features_follow_the_definition(kind: str) -> None:
    samples = waveforms()[kind]
    found = speech.LogMel()(to_waves(samples))
    assert found.shape == (1, 49, 40)
    off = np.abs(found[0].double().numpy() - reference_features(samples))
    assert off.max() < 0.15  # float32, 110 dB below the loudest band
    assert off.mean() < 0.01


def test_a_batch_is_its_clips() -> None:
    clips = [to_waves(samples) for samples in waveforms().values() if len(samples) == 16_000]
    front_end = speech.LogMel()
    apart = torch.cat([front_end(clip) for clip in clips])
    torch.testing.assert_close(front_end(torch.cat(clips)), apart, atol=1e-4, rtol=0)


def test_a_sine_has_its_known_level_and_band() -> None:
    # On a line of the spectrum: |rfft| = amplitude / 2 * (sum of the window = 320).
    k = 64
    samples = pcm(0.5 * np.sin(2 * np.pi * k * 16_000 / 1024 * TIME))
    found = speech.LogMel()(to_waves(samples))[0]
    lines = np.abs(np.fft.rfft(0.5 - 0.5 * np.cos(2 * np.pi * np.arange(640) / 640), 1024)) ** 2
    assert lines[0] == pytest.approx(320**2)
    band = int(BANDS[k].argmax())
    assert found[20].argmax() == band
    near = np.abs(np.arange(513) - k)
    expected = 10 * math.log10(0.25**2 * lines[np.minimum(near, 512)] @ BANDS[:, band])
    assert found[20, band].item() == pytest.approx(expected, abs=0.01)


def test_nothing_is_at_the_floor() -> None:
    assert speech.LogMel()(torch.zeros(2, 16_000)).eq(-80).all()
    assert speech.encode(speech.LogMel()(torch.zeros(1, 3))).eq(0).all()


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_autocast_has_no_effect(half: torch.dtype) -> None:
    waves = torch.cat([to_waves(waveforms()[kind]) for kind in ("sine", "faint noise", "square")])
    module = whole_front_end()
    expected = module(waves)
    with torch.autocast("cpu", half):
        assert module(waves).equal(expected)


@pytest.mark.parametrize(
    "waves",
    [torch.zeros(16_000), torch.zeros(1, 1, 16_000), torch.zeros(1, 16_000, dtype=torch.int16)],
)
def test_other_tensors_are_refused(waves: Tensor) -> None:
    with pytest.raises(InputError, match=r"expected floating-point waveforms.*scaled\(samples\)"):
        speech.LogMel()(waves)


def test_codes_are_half_decibels() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    levels = speech.decibels(codes)
    assert levels[0] == -80
    assert levels[-1] == 47.5
    assert speech.encode(levels).equal(codes)
    for off in (-0.24, 0.24):
        assert speech.encode(levels + off).equal(codes)
    assert speech.encode(torch.tensor([-500.0, 47.6, 60.0, 1e9])).tolist() == [0, 255, 255, 255]


def test_samples_are_divided_by_32768() -> None:
    samples = torch.tensor([-32768, 16384, 1], dtype=torch.int16)
    assert speech.scaled(samples).tolist() == [-1, 0.5, 2**-15]


def test_numbers_of_another_kind_are_refused() -> None:
    with pytest.raises(InputError, match=r"torch\.uint8.*torch\.float32"):
        speech.decibels(torch.zeros(3))
    with pytest.raises(InputError, match=r"torch\.int16.*torch\.uint8"):
        speech.scaled(torch.zeros(3, dtype=torch.uint8))


def some_codes(seed: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count, 49, 40), generator=generator, dtype=torch.uint8)


def test_coefficients_follow_the_definition() -> None:
    features = speech.decibels(some_codes(0, 3))
    found = speech.Mfcc()(features)
    assert found.shape == (3, 1, 49, 10)
    expected = np.stack([reference_mfcc(clip) for clip in features.double().numpy()])
    np.testing.assert_allclose(found[:, 0].double(), expected, atol=1e-3)


def test_coefficients_are_normalised_by_the_clips_they_were_fitted_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(speech, "_CHUNK", 3)  # several chunks, and one that is not full
    codes = torch.cat([some_codes(1, 5), some_codes(2, 5) // 4])
    mfcc = speech.fit_mfcc(codes)
    plain = np.stack([reference_mfcc(c) for c in speech.decibels(codes).double().numpy()])
    flat = plain.reshape(-1, 10)
    np.testing.assert_allclose(mfcc.mean.double(), flat.mean(0), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(mfcc.std.double(), flat.std(0), rtol=1e-4)
    values = mfcc(speech.decibels(codes))[:, 0].flatten(0, 1)
    torch.testing.assert_close(values.mean(0), torch.zeros(10), atol=1e-4, rtol=0)
    torch.testing.assert_close(values.std(0, correction=0), torch.ones(10), atol=1e-4, rtol=0)


def test_what_never_changes_is_not_divided_by_zero() -> None:
    mfcc = speech.fit_mfcc(torch.full((2, 49, 40), 7, dtype=torch.uint8))
    assert mfcc.std.eq(1).all()
    with pytest.raises(InputError, match="got none"):
        speech.fit_mfcc(torch.zeros(0, 49, 40, dtype=torch.uint8))


def test_the_normalisation_is_saved_with_the_model() -> None:
    fitted = speech.fit_mfcc(some_codes(3, 4))
    again = speech.Mfcc()
    again.load_state_dict(fitted.state_dict())
    assert again.mean.equal(fitted.mean)
    assert again.std.equal(fitted.std)


def whole_front_end() -> nn.Module:
    return nn.Sequential(speech.LogMel(), speech.fit_mfcc(some_codes(4, 4))).eval()


@pytest.mark.parametrize("length", [16_000, 9_000])
def test_the_front_end_can_be_exported(length: int) -> None:
    module = whole_front_end()
    waves = speech.scaled(torch.from_numpy(np.stack([noise(i, length) for i in range(3)])))
    batch = torch.export.Dim("batch")
    exported = torch.export.export(module, (waves[:2],), dynamic_shapes=({0: batch},)).module()
    torch.testing.assert_close(exported(waves), module(waves))


@pytest.mark.filterwarnings("ignore")  # of the exporter, about itself
def test_the_front_end_runs_as_onnx(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    module = whole_front_end()
    silent = np.zeros_like(noise(0))  # digital silence, of which the logarithm is -inf
    waves = speech.scaled(torch.from_numpy(np.stack([noise(0), silent, noise(2)])))
    shapes = ({0: torch.export.Dim("batch")},)
    path = tmp_path / "front_end.onnx"
    torch.onnx.export(module, (waves[:2],), path, dynamo=True, dynamic_shapes=shapes, verbose=False)
    session = runtime.InferenceSession(path)
    (found,) = session.run(None, {session.get_inputs()[0].name: waves.numpy()})
    np.testing.assert_allclose(found, module(waves).numpy(), atol=1e-3)


# --- random changes of features -----------------------------------------------------------


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def shifted(clip: np.ndarray, later: int) -> np.ndarray:
    quietest = clip[clip.astype(float).sum(1).argmin()]
    rows = [clip[i - later] if 0 <= i - later < len(clip) else quietest for i in range(len(clip))]
    return np.stack(rows)


@pytest.mark.parametrize("as_codes", [True, False])
def test_clips_are_moved_by_whole_frames(as_codes: bool) -> None:
    clips = some_codes(5, 200)
    clips = clips if as_codes else speech.decibels(clips)
    moved = speech.shift_frames(clips, 3, generator=seeded())
    assert moved.dtype == clips.dtype
    seen = Counter()
    for before, after in zip(clips.numpy(), moved.numpy(), strict=True):
        matches = [s for s in range(-3, 4) if np.array_equal(after, shifted(before, s))]
        assert len(matches) == 1
        seen.update(matches)
    assert sorted(seen) == list(range(-3, 4))
    assert max(seen.values()) < 60  # of 200 among 7


def test_no_shift_changes_nothing() -> None:
    clips = some_codes(6, 4)
    assert speech.shift_frames(clips, 0).equal(clips)


def test_noise_adds_its_power_to_features() -> None:
    clips = speech.decibels(some_codes(7, 400))
    one_noise = speech.decibels(some_codes(8, 1))
    mixed = speech.mix_features(clips, one_noise, volume=0.5, generator=seeded()).double()
    power, more = 10 ** (clips.double() / 10), 10 ** (one_noise.double() / 10)
    # The level is one number for a clip: found where the noise is loudest beside the clip.
    ratio = (10 ** (mixed / 10) - power) / (more - 1e-8).clamp_min(1e-30)
    loudest = (more / power).flatten(1).argmax(1, keepdim=True)
    v2 = ratio.flatten(1).gather(1, loudest).clamp_min(0)
    expected = 10 * torch.log10(power + v2.unsqueeze(2) * (more - 1e-8))
    torch.testing.assert_close(mixed, expected, atol=2e-3, rtol=0)
    level = v2.sqrt().flatten()
    untouched = (level < 1e-3).double().mean()
    assert 0.12 < untouched < 0.28  # 1 - 0.8
    assert level.max() <= 0.5 + 1e-3
    heard = level[level > 1e-3]
    assert heard.mean() == pytest.approx(0.25, abs=0.03)  # uniform in [0, 0.5]
    assert heard.std() == pytest.approx(0.5 / math.sqrt(12), abs=0.02)


def test_noise_without_a_chance_or_volume_changes_nothing() -> None:
    clips, noises = speech.decibels(some_codes(9, 5)), speech.decibels(some_codes(10, 3))
    for options in ({"chance": 0.0}, {"volume": 0.0}):
        mixed = speech.mix_features(clips, noises, **options)
        torch.testing.assert_close(mixed, clips, atol=1e-4, rtol=0)


def test_every_noise_is_used() -> None:
    nothing = torch.full((300, 49, 40), -80.0)
    noises = torch.stack([torch.full((49, 40), -80.0), torch.full((49, 40), -80.0)])
    noises[0, :, 3], noises[1, :, 7] = 40.0, 40.0
    mixed = speech.mix_features(nothing, noises, chance=1.0, generator=seeded())
    bands = mixed[:, 0].argmax(1)
    assert set(bands.tolist()) == {3, 7}
    assert 100 < (bands == 3).sum() < 200


def test_mixed_features_are_those_of_mixed_waveforms_on_average(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(speech, "_levels", lambda count, *_: torch.full((count,), 0.3))
    clips = speech.scaled(torch.from_numpy(np.stack([noise(i, size=0.05) for i in range(40)])))
    other = torch.from_numpy(noise(50, 160_000, size=0.2))
    front_end, pieces = speech.LogMel(), speech.recordings([other])
    by_waves = front_end(speech.mix_waves(clips, pieces, generator=seeded()))
    noises = front_end(speech.scaled(pieces.crops(40, generator=seeded(1))))
    by_features = speech.mix_features(front_end(clips), noises, generator=seeded())

    def level(features: Tensor) -> Tensor:  # (40,) of the mean power
        return 10 * (10 ** (features / 10)).mean((0, 1)).log10()

    torch.testing.assert_close(level(by_features), level(by_waves), atol=0.3, rtol=0)
    assert (level(by_features) - level(front_end(clips))).min() > 2  # 1 + 0.06^2 / 0.05^2: 3.9 dB


# --- random changes of waveforms ----------------------------------------------------------


def test_waveforms_are_moved_over_zeros() -> None:
    waves = torch.arange(1.0, 101).repeat(300, 1)  # a ramp: each sample tells its place
    moved = speech.shift_waves(waves, 4, generator=seeded())
    seen = Counter()
    for row in moved:
        place = int(row[50] - 51)  # how much earlier
        expected = torch.zeros(100)
        kept = torch.arange(100) + place
        inside = (kept >= 0) & (kept < 100)
        expected[inside] = kept[inside] + 1.0
        assert row.equal(expected)
        seen[place] += 1
    assert sorted(seen) == list(range(-4, 5))


def test_waveforms_are_moved_by_100_ms() -> None:
    waves = torch.zeros(500, 16_000)
    waves[:, 8_000] = 1
    places = speech.shift_waves(waves, generator=seeded()).argmax(1) - 8_000
    assert places.abs().max() <= 1_600
    assert places.min() < -1_500
    assert places.max() > 1_500


def test_crops_come_from_within_each_recording() -> None:
    # The sign and height of a sample tell the recording, steps of 1 its place.
    first = torch.arange(16_003, dtype=torch.int16)
    second = -torch.arange(1, 16_011, dtype=torch.int16)
    crops = speech.recordings([first, second]).crops(400, generator=seeded())
    assert crops.shape == (400, 16_000)
    ups, downs = crops[crops[:, 1] > 0], crops[crops[:, 1] < 0]
    assert 130 < len(ups) < 270
    assert (ups - ups[:, :1]).eq(torch.arange(16_000)).all()
    assert (downs - downs[:, :1]).eq(-torch.arange(16_000)).all()
    assert set(ups[:, 0].tolist()) == set(range(4))  # with the first and the last place
    assert set(downs[:, 0].tolist()) == set(range(-11, 0))


def test_noise_is_added_to_waveforms() -> None:
    piece = torch.full((16_000,), 16_384, dtype=torch.int16)  # 0.5 everywhere
    waves = torch.full((500, 16_000), 0.25)
    mixed = speech.mix_waves(waves, speech.recordings([piece]), generator=seeded())
    added = (mixed - waves)[:, 0] / 0.5
    torch.testing.assert_close(mixed - waves, (added * 0.5).unsqueeze(1).expand_as(waves))
    assert 0.72 < (added > 0).double().mean() < 0.88  # 0.8
    assert added.max() <= 0.1 + 1e-6
    assert added[added > 0].mean().item() == pytest.approx(0.05, abs=0.005)
    loud = speech.mix_waves(torch.ones(50, 16_000), speech.recordings([piece]))
    assert loud.max() == 1  # cut, as a 16-bit file would be


def test_short_noise_is_refused() -> None:
    pieces = [torch.zeros(20_000, dtype=torch.int16), torch.zeros(15_999, dtype=torch.int16)]
    with pytest.raises(InputError, match="16000 samples or more, got some of 15999"):
        speech.recordings(pieces)
    with pytest.raises(InputError, match="got none"):
        speech.recordings([])


def test_recordings_keep_their_contents_on_another_device() -> None:
    pieces = speech.recordings([torch.from_numpy(noise(1, 17_000))])
    there = pieces.to("meta")
    assert there.samples.device.type == there.starts.device.type == "meta"
    assert pieces.to("cpu").samples.equal(pieces.samples)


# --- the split by speaker -----------------------------------------------------------------


def published_rule(filename: str) -> str:
    """As the data set's README has it."""
    hashed = hashlib.sha1(filename.partition("_nohash_")[0].encode()).hexdigest()
    percentage = (int(hashed, 16) % (134217727 + 1)) * (100.0 / 134217727)
    if percentage < 10.0:
        return "val"
    return "test" if percentage < 20.0 else "train"


def test_speakers_are_split_by_the_published_rule() -> None:
    names = [f"{i * 2654435761 % 2**32:08x}_nohash_{i % 5}.wav" for i in range(3_000)]
    parts = [speech_folder.official_part(name) for name in names]
    assert parts == [published_rule(name) for name in names]
    shares = Counter(parts)
    assert 240 < shares[Part.VAL] < 360
    assert 240 < shares[Part.TEST] < 360


def test_a_speaker_stays_in_one_part() -> None:
    for speaker in ("bobby", "0a7c2a8d", "3cfc6b3a"):
        found = {speech_folder.official_part(f"{speaker}_nohash_{n}.wav") for n in range(20)}
        assert len(found) == 1


# --- a folder of wav files ----------------------------------------------------------------


def write_wav(path: Path, samples: np.ndarray, rate: int = 16_000, channels: int = 1) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, samples.itemsize, rate, 0, "NONE", ""))
        file.writeframes(samples.tobytes())


def speakers(part: str, count: int) -> list[str]:
    names = (f"{i:08x}" for i in range(10_000))
    return [name for name in names if published_rule(name) == part][:count]


SPEAKERS = {"train": speakers("train", 3), "val": speakers("val", 1), "test": speakers("test", 1)}
EVERYBODY = [name for names in SPEAKERS.values() for name in names]
OTHERS = ("bed", "cat", "zero")


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speech") / "commands"
    seed = 100
    for word in (*KEYWORDS, *OTHERS):
        for speaker in EVERYBODY:
            seed += 1
            length = (12_000, 16_000, 17_500)[seed % 3]
            write_wav(folder / word / f"{speaker}_nohash_0.wav", noise(seed, length))
    write_wav(folder / "_background_noise_" / "hum.wav", noise(1, 40_000))
    write_wav(folder / "_background_noise_" / "tap.wav", noise(2, 30_000))
    (folder / "_background_noise_" / "README.md").write_text("noise")
    (folder / "README.md").write_text("words")
    (folder / "yes" / "._junk.wav").write_text("of another system")
    return folder


@pytest.fixture
def folder(made_once: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(made_once, tmp_path / "commands"))


def counts(part: SpeechPart) -> list[int]:
    return torch.bincount(part.labels, minlength=12).tolist()


def test_classes_are_in_the_packed_order() -> None:
    words = "_silence_ _unknown_ yes no up down left right on off stop go"
    assert " ".join(CLASSES) == words


def test_a_folder_gives_all_keywords_and_ten_percent_of_the_rest(made_once: Path) -> None:
    data = speech_data.read_clips(made_once)
    assert counts(data.train) == [3, 3, *[3] * 10]
    assert counts(data.val) == [1, 1, *[1] * 10]
    assert counts(data.test) == [1, 1, *[1] * 10]
    assert data.noise is None
    assert data.train.waves is None
    assert data.silence.equal(data.train.codes[data.train.labels == 0])
    assert len(data.silence) == 3


def expected_codes(path: Path) -> np.ndarray:
    with wave.open(str(path)) as file:
        samples = np.frombuffer(file.readframes(100_000), "<i2")
    return np.clip(np.round((reference_features(samples) + 80) / 0.5), 0, 255)


def test_each_clip_has_its_own_features_and_label(made_once: Path) -> None:
    data = speech_data.read_clips(made_once)
    for part in ("train", "val", "test"):
        found: SpeechPart = getattr(data, part)
        for word in KEYWORDS:
            codes = found.codes[found.labels == CLASSES.index(word)].numpy()
            for speaker, row in zip(sorted(SPEAKERS[part]), codes, strict=True):
                expected = expected_codes(made_once / word / f"{speaker}_nohash_0.wav")
                off = np.abs(row.astype(int) - expected)
                assert off.max() <= 1  # float32 may round the other way
                assert off.mean() < 0.01


def test_unknown_words_are_of_the_part(made_once: Path) -> None:
    data = speech_data.read_clips(made_once)
    for part in ("train", "val", "test"):
        found: SpeechPart = getattr(data, part)
        paths = [made_once / w / f"{s}_nohash_0.wav" for w in OTHERS for s in SPEAKERS[part]]
        candidates = [expected_codes(path) for path in paths]
        for row in found.codes[found.labels == 1].numpy():
            assert min(np.abs(row.astype(int) - other).max() for other in candidates) <= 1


def test_unknown_words_are_of_all_kinds() -> None:
    def files(words: list[str], each: int) -> list[speech_folder.WavFile]:
        return [
            speech_folder.WavFile(f"{word}/{i}.wav", 1, 1) for word in words for i in range(each)
        ]

    keywords, others = files(["yes", "go"], 100), files(["bed", "cat", "dog", "wow"], 50)
    chosen = speech_folder._choose(others + keywords)
    drawn = Counter(file.name.split("/")[0] for file in chosen)
    assert drawn.pop("yes") == drawn.pop("go") == 100
    assert sum(drawn.values()) == 20
    assert len(drawn) == 4
    assert {file.name for file in speech_folder._choose(keywords + others[::-1])} == {
        file.name for file in chosen
    }


def test_shares_are_rounded_up(folder: Path) -> None:
    write_wav(folder / "yes" / f"{SPEAKERS['val'][0]}_nohash_1.wav", noise(9))
    data = speech_data.read_clips(folder)
    assert counts(data.val) == [2, 2, 2, *[1] * 9]  # 10% of 11


def test_waveforms_come_with_the_same_clips(made_once: Path) -> None:
    plain, data = speech_data.read_clips(made_once), speech_data.read_waves(made_once)
    front_end = speech.LogMel()
    for part in Part:
        with_waves: SpeechPart = getattr(data, part)
        assert with_waves.codes.equal(getattr(plain, part).codes)
        assert with_waves.labels.equal(getattr(plain, part).labels)
        assert with_waves.waves is not None
        assert with_waves.waves.dtype == torch.int16
        assert with_waves.waves.shape == (len(with_waves.labels), 16_000)
        again = speech.encode(front_end(speech.scaled(with_waves.waves)))
        assert (again.int() - with_waves.codes.int()).abs().max() <= 1
    assert data.noise is not None
    assert data.noise.lengths.tolist() == [40_000, 30_000]
    assert data.train.rows(torch.tensor([2, 0])).waves.equal(data.train.waves[[2, 0]])


def test_silence_is_noise_at_a_lower_level(made_once: Path) -> None:
    data = speech_data.read_waves(made_once)
    assert data.noise is not None
    recorded = data.noise.samples.double()
    found = torch.cat(
        [part.waves[part.labels == 0] for part in (data.train, data.val, data.test)]
    ).double()
    windows = recorded.unfold(0, 16_000, 1)[:, ::500]  # (places, 32): all, with some samples
    for crop in found:
        some = crop[::500]
        level = (windows @ some) / windows.square().sum(1)
        off = (windows * level.unsqueeze(1) - some).abs().amax(1)
        best = int(off.argmin())
        assert off[best] < 0.6  # rounded to 16 bits
        assert 0 < level[best] < 1
    assert len({tuple(crop[:5].tolist()) for crop in found}) == len(found)


def test_large_parts_are_read_in_chunks(made_once: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = speech_data.read_waves(made_once)
    monkeypatch.setattr(speech_data, "_CHUNK", 2)
    found = speech_data.read_waves(made_once)
    for part in Part:
        assert getattr(found, part).waves.equal(getattr(expected, part).waves)
        off = getattr(found, part).codes.int() - getattr(expected, part).codes.int()
        assert off.abs().max() <= 1


def swap_lists(folder: Path) -> None:
    """Lists that say the opposite of the rule: val is test, and test is val."""
    for name, part in (("validation_list.txt", "test"), ("testing_list.txt", "val")):
        lines = [f"{w}/{s}_nohash_0.wav" for w in (*KEYWORDS, *OTHERS) for s in SPEAKERS[part]]
        (folder / name).write_text("\n".join([*lines, f"gone/{part}_nohash_0.wav", ""]))


def test_lists_are_followed(folder: Path) -> None:
    by_rule = speech_data.read_clips(folder)
    swap_lists(folder)
    by_lists = speech_data.read_clips(folder)
    words = slice(0, 11)  # without silence, which belongs to no speaker
    assert by_lists.val.codes[words].equal(by_rule.test.codes[words])
    assert by_lists.test.codes[words].equal(by_rule.val.codes[words])
    assert by_lists.train.codes.equal(by_rule.train.codes)


def test_one_list_alone_is_refused(folder: Path) -> None:
    swap_lists(folder)
    (folder / "testing_list.txt").unlink()
    with pytest.raises(InputError, match=r"has validation_list\.txt, but no testing_list\.txt"):
        speech_data.read_clips(folder)


def test_lists_that_share_a_speaker_are_refused(folder: Path) -> None:
    swap_lists(folder)
    with (folder / "testing_list.txt").open("a") as file:
        file.write(f"yes/{SPEAKERS['train'][1]}_nohash_0.wav\n")
    with pytest.raises(InputError, match=f"the same speaker .* {SPEAKERS['train'][1]}"):
        speech_data.read_clips(folder)


def test_lists_that_share_a_clip_are_refused(folder: Path) -> None:
    swap_lists(folder)
    clip = (folder / "validation_list.txt").read_text().splitlines()[0]
    with (folder / "testing_list.txt").open("a") as file:
        file.write(f"{clip}\n")
    with pytest.raises(InputError, match=f"both have {clip}"):
        speech_data.read_clips(folder)


def test_lists_of_something_else_are_refused(folder: Path) -> None:
    swap_lists(folder)
    (folder / "testing_list.txt").write_text("<html>\n")
    with pytest.raises(InputError, match=r"testing_list\.txt: expected lines .* got <html>"):
        speech_data.read_clips(folder)


def test_whatever_a_folder_lacks_is_said_at_once(folder: Path) -> None:
    shutil.rmtree(folder / "_background_noise_")
    shutil.rmtree(folder / "stop")
    for word in OTHERS:
        (folder / word / f"{SPEAKERS['val'][0]}_nohash_0.wav").unlink()
    with pytest.raises(InputError) as caught:
        speech_data.read_clips(folder)
    message = str(caught.value)
    assert "no wav file in _background_noise_" in message
    assert "nothing for train of stop;" in message
    assert "nothing for val of _unknown_, stop;" in message
    assert "nothing for test of stop." in message
    assert "or packed features (logmel.npz" in message


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere cannot be read: No such file"):
        speech_data.read_clips(tmp_path / "nowhere")


def riff(samples: np.ndarray) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, 16_000, 0, "NONE", ""))
        writer.writeframes(samples.tobytes())
    return file.getvalue()


def floating(content: bytes) -> bytes:
    return content[:20] + b"\x03\x00" + content[22:]  # the format's tag: 3 is floating point


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "stereo": (
        lambda path: write_wav(path, noise(0, 8_000), channels=2),
        "got 16 bits, 2 channels, 16000 Hz",
    ),
    "8 kHz": (
        lambda path: write_wav(path, noise(0, 8_000), rate=8_000),
        "got 16 bits, 1 channel, 8000 Hz",
    ),
    "8 bits": (
        lambda path: write_wav(path, np.zeros(8_000, np.uint8)),
        "got 8 bits, 1 channel, 16000 Hz",
    ),
    "floating": (lambda path: path.write_bytes(floating(riff(noise(0)))), "got unknown format: 3"),
    "cut off": (
        lambda path: path.write_bytes(riff(noise(0))[:-1_000]),
        "expected 16000 samples, got 15500: it was cut off",
    ),
    "no samples": (lambda path: path.write_bytes(riff(noise(0)[:0])), "expected some samples"),
    "text": (lambda path: path.write_text("not a sound at all"), "does not start with RIFF id"),
    "empty": (lambda path: path.write_bytes(b""), "got one that was cut off"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_another_kind_of_file_is_named_with_what_was_found(tmp_path: Path, kind: str) -> None:
    damage, message = DAMAGE[kind]
    path = tmp_path / "x.wav"
    damage(path)
    with pytest.raises(InputError) as caught:
        speech_data.read_wav(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_a_wav_file_is_read_sample_by_sample(tmp_path: Path) -> None:
    samples = np.array([0, 1, -1, 32767, -32768, 256], np.int16)
    write_wav(tmp_path / "x.wav", samples)
    assert speech_data.read_wav(tmp_path / "x.wav").tolist() == samples.tolist()


def test_all_files_that_cannot_be_used_are_named(folder: Path) -> None:
    bad = [folder / word / f"{EVERYBODY[i]}_nohash_0.wav" for i, word in enumerate(KEYWORDS[:5])]
    for path in bad:
        path.write_bytes(b"RIFF")
    with pytest.raises(InputError) as caught:
        speech_data.read_clips(folder)
    assert all(str(path) in str(caught.value) for path in bad)
    assert "and 1 more" not in str(caught.value)


def test_many_files_that_cannot_be_used_are_counted(folder: Path) -> None:
    for path in (folder / "yes").parent.glob("[a-z]*/*_nohash_0.wav"):
        if path.parent.name in KEYWORDS:
            path.write_bytes(b"RIFF")
    with pytest.raises(InputError, match=r"\.\.\. and 40 more files"):
        speech_data.read_clips(folder)


def test_noise_that_is_too_short_is_named(folder: Path) -> None:
    write_wav(folder / "_background_noise_" / "tap.wav", noise(2, 15_000))
    with pytest.raises(InputError, match=r"tap\.wav: expected noise .* got 15000 samples"):
        speech_data.read_clips(folder)


# --- the cache ----------------------------------------------------------------------------


def same(a: SpeechData, b: SpeechData) -> bool:
    return all(
        getattr(a, part).codes.equal(getattr(b, part).codes)
        and getattr(a, part).labels.equal(getattr(b, part).labels)
        for part in Part
    )


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the wav files that are read from now on."""
    seen: list[str] = []
    original = speech_data.read_wav

    def noted(path: Path) -> Tensor:
        seen.append(path.name)
        return original(path)

    monkeypatch.setattr(speech_data, "read_wav", noted)
    return seen


def test_the_cache_saves_reading(folder: Path, tmp_path: Path, reads: list[str]) -> None:
    cache = tmp_path / "made" / "here"
    first = speech_data.read_clips(folder, cache=cache)
    assert len(reads) == 50 + 5 + 2
    assert [path.name for path in cache.iterdir()] == ["commands-logmel.npz"]
    reads.clear()
    again = speech_data.read_clips(folder, cache=cache)
    assert not reads
    assert same(first, again)
    assert again.train.labels.dtype == torch.int64


def change_time(folder: Path) -> None:
    path = folder / "go" / f"{EVERYBODY[0]}_nohash_0.wav"
    state = path.stat()
    write_wav(path, noise(999, (state.st_size - 44) // 2))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 1_000))


STALE: dict[str, Callable[[Path], object]] = {
    "another clip": lambda folder: write_wav(
        folder / "go" / f"{EVERYBODY[0]}_nohash_1.wav", noise(5)
    ),
    "a clip less": lambda folder: (folder / "go" / f"{EVERYBODY[0]}_nohash_0.wav").unlink(),
    "changed clip": change_time,
    "changed noise": lambda folder: write_wav(
        folder / "_background_noise_" / "tap.wav", noise(5, 30_001)
    ),
    "other lists": swap_lists,
}


@pytest.mark.parametrize("kind", STALE)
def test_a_stale_cache_is_made_anew(
    folder: Path, tmp_path: Path, reads: list[str], kind: str
) -> None:
    speech_data.read_clips(folder, cache=tmp_path)
    reads.clear()
    STALE[kind](folder)
    found = speech_data.read_clips(folder, cache=tmp_path)
    assert reads
    assert same(found, speech_data.read_clips(folder))
    reads.clear()
    assert same(found, speech_data.read_clips(folder, cache=tmp_path))
    assert not reads


def test_another_front_end_makes_the_cache_anew(
    folder: Path, tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    speech_data.read_clips(folder, cache=tmp_path)
    reads.clear()
    monkeypatch.setitem(speech.SETTINGS, "fft", 512)
    speech_data.read_clips(folder, cache=tmp_path)
    assert reads


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


SPOILED: dict[str, Callable[[Path], object]] = {
    "a bit": flip,
    "its end": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "everything": lambda path: path.write_bytes(b""),
    "its kind": lambda path: path.write_bytes(b"\x80\x04N."),  # a pickle
}


@pytest.mark.parametrize("kind", SPOILED)
def test_a_damaged_cache_is_made_anew(
    folder: Path, tmp_path: Path, reads: list[str], kind: str
) -> None:
    first = speech_data.read_clips(folder, cache=tmp_path)
    path = tmp_path / "commands-logmel.npz"
    SPOILED[kind](path)
    reads.clear()
    assert same(first, speech_data.read_clips(folder, cache=tmp_path))
    assert reads
    assert not list(tmp_path.glob(".splitgrow-tmp-*"))


def test_a_cache_that_cannot_be_written_is_known_before_the_work(
    folder: Path, tmp_path: Path, reads: list[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match=r"cannot be written: .* another folder for the cache"):
        speech_data.read_clips(folder, cache=tmp_path / "file" / "cache")
    assert not reads


# --- the packed features ------------------------------------------------------------------


def packed_arrays() -> dict[str, np.ndarray]:
    labels = np.concatenate([np.arange(12)] * 3).astype(np.uint8)
    return {
        "x": some_codes(20, 36).numpy(),
        "y": labels,
        "split": np.array([0] * 20 + [1] * 12 + [0] * 4, np.uint8),
        "speaker": np.arange(36, dtype=np.uint32),
        "x_test": some_codes(21, 13).numpy(),
        "y_test": np.array([*range(12), 11], np.uint8),
        "classes": np.array(CLASSES),
    }


def write_packed(folder: Path, **changed: np.ndarray | None) -> Path:
    arrays = {**packed_arrays(), **changed}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "logmel.npz"
    np.savez(path, **{name: value for name, value in arrays.items() if value is not None})
    return path


@pytest.mark.parametrize("place", [".", "speech_commands"])
@pytest.mark.parametrize("read", [speech_packed.read_packed, speech_data.speech_commands])
def test_packed_features_are_read(
    tmp_path: Path, place: str, read: Callable[[Path], SpeechData]
) -> None:
    write_packed(tmp_path / place)
    data, arrays = read(tmp_path), packed_arrays()
    for part, number in ((data.train, 0), (data.val, 1)):
        chosen = arrays["split"] == number
        assert np.array_equal(part.codes.numpy(), arrays["x"][chosen])
        assert part.labels.tolist() == arrays["y"][chosen].tolist()
        assert part.labels.dtype == torch.int64
        assert part.waves is None
    assert np.array_equal(data.test.codes.numpy(), arrays["x_test"])
    assert data.test.labels.tolist() == arrays["y_test"].tolist()
    assert data.silence.equal(data.train.codes[data.train.labels == 0])


def test_a_folder_without_packed_features_is_read_as_clips(made_once: Path) -> None:
    assert same(speech_data.speech_commands(made_once), speech_data.read_clips(made_once))


def test_missing_packed_features_are_said_where(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        speech_packed.read_packed(tmp_path)
    assert str(tmp_path / "speech_commands" / "logmel.npz") in str(caught.value)


WRONG: dict[str, tuple[dict[str, np.ndarray | None], str]] = {
    "no test": ({"x_test": None, "y_test": None}, "expected the arrays x_test, y_test, got none"),
    "classes": ({"classes": np.array(CLASSES[::-1])}, "classes: expected _silence_, _unknown_"),
    "shape": ({"x": np.zeros((36, 40, 49), np.uint8)}, r"x: .*\(clips, 49, 40\).*\(36, 40, 49\)"),
    "kind": ({"x": np.zeros((36, 49, 40), np.float32)}, "x: expected bytes .* got float32"),
    "fewer labels": ({"y_test": np.zeros(3, np.uint8)}, "y_test: expected 13 labels"),
    "labels": ({"y_test": np.full(13, 12, np.uint8)}, "y_test: expected 13 labels from 0 to 11"),
    "split": ({"split": np.full(36, 2, np.uint8)}, "split: expected 0"),
    "split's length": ({"split": np.zeros(3, np.uint8)}, "split: expected 0"),
    "a class": ({"split": np.zeros(36, np.uint8)}, "got none of .*'_silence_'.* in val"),
    "objects": ({"y": np.array([None] * 36)}, "not an npz file of numbers.*allow_pickle=False"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_packed_features_of_another_kind_are_refused(tmp_path: Path, kind: str) -> None:
    changed, message = WRONG[kind]
    path = write_packed(tmp_path, **changed)
    with pytest.raises(InputError, match=message) as caught:
        speech_packed.read_packed(tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("kind", SPOILED)
def test_damaged_packed_features_are_refused(tmp_path: Path, kind: str) -> None:
    SPOILED[kind](write_packed(tmp_path))
    with pytest.raises(InputError, match="or it is damaged"):
        speech_packed.read_packed(tmp_path)


def test_a_single_array_is_no_packed_file(tmp_path: Path) -> None:
    with (tmp_path / "logmel.npz").open("wb") as file:
        np.save(file, np.arange(3))
    with pytest.raises(InputError, match="expected the arrays x, y"):
        speech_packed.read_packed(tmp_path)


# --- shares -------------------------------------------------------------------------------


def test_clips_are_drawn_with_the_shares_asked_for() -> None:
    labels = torch.tensor([0] * 10 + [1] * 300 + [2] * 100 + [11] * 50)
    weights = speech_parts.row_weights(labels, 0.08)
    assert weights.sum().item() == pytest.approx(1)
    assert weights[labels == 0].sum().item() == pytest.approx(0.08)
    assert weights[labels == 1].sum().item() == pytest.approx(0.08)
    assert weights[labels > 1].unique().numel() == 1  # keywords as often as they are there
    assert torch.multinomial(weights, 1_000, replacement=True).max() < len(labels)


def test_a_part_can_be_brought_to_the_official_shares() -> None:
    labels = torch.tensor([1] * 40 + [0] * 2 + [3] * 21 + [1] * 20 + [9] * 4)
    part = SpeechPart(torch.arange(87, dtype=torch.uint8).view(-1, 1, 1), labels)
    found = speech_parts.official_shares(part)
    assert counts(found) == [2, 3, 0, 21, 0, 0, 0, 0, 0, 4, 0, 0]  # 10% of 25, rounded up
    kept = found.codes.flatten().long()
    assert found.labels.equal(labels[kept])  # still in order, each with its own label
    unknown = kept[found.labels == 1].tolist()
    assert unknown == [0, 20, 61 + 2]
