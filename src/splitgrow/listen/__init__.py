"""Keyword spotting with an exported model: which word is said in a wav file?

    from splitgrow.listen import Spotter, read_clips

    spotter = Spotter("model.onnx")
    for heard in spotter.hear(read_clips(["yes.wav", "maybe.wav"])):
        print(heard.clip.path, heard.best(1))

The file brings along its classes and how sound becomes its input; see :class:`Keywords`.
"""

from splitgrow.listen.clip import Clip, read_clip, read_clips, usable_clips
from splitgrow.listen.keywords import Keywords
from splitgrow.listen.spotter import Heard, Spotter

__all__ = ["Clip", "Heard", "Keywords", "Spotter", "read_clip", "read_clips", "usable_clips"]
