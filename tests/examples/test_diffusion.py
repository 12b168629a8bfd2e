"""The diffusion model learns, and its samples become a picture."""

import re
import struct
import zlib

import numpy as np
import pytest

from tests.examples.loading import load_example
from tests.examples.running import read_steps, run_well

diffusion = load_example("diffusion")


def read_picture(path):
    """Returns the pixels of a gray PNG file without filters."""
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    chunks = {}
    place = 8
    while place < len(content):
        size, kind = struct.unpack_from(">I4s", content, place)
        data = content[place + 8 : place + 8 + size]
        [checksum] = struct.unpack_from(">I", content, place + 8 + size)
        assert checksum == zlib.crc32(kind + data)
        chunks[kind] = data
        place += 12 + size
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, bits, color = struct.unpack_from(">2I2B", chunks[b"IHDR"])
    assert (bits, color) == (8, 0)
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8)
    lines = lines.reshape(height, width + 1)
    assert (lines[:, 0] == 0).all()
    return lines[:, 1:]


def test_the_picture_has_the_images_in_their_rows_and_columns(tmp_path):
    images = np.zeros((2, 3, 4, 5))
    images[1, 2] = 0.6
    images[0, 1] = 7.0  # too bright, so it becomes white
    path = tmp_path / "grid.png"
    diffusion.write_picture(path, images, scale=2)
    pixels = read_picture(path)
    assert pixels.shape == (2 * (4 + 2) * 2, 3 * (5 + 2) * 2)
    assert (pixels[14:22, 30:40] == 153).all()
    assert (pixels[2:10, 16:26] == 255).all()
    assert (pixels[2:10, 2:12] == 0).all()


def test_the_last_time_leaves_almost_nothing_of_an_image():
    betas, shares = diffusion.make_schedule()
    assert betas.shape == shares.shape == (diffusion.NUM_TIMES,)
    assert (np.diff(shares) < 0).all()
    assert shares[0] > 0.99
    assert shares[-1] < 0.01


@pytest.mark.slow
def test_training_learns_and_draws(tmp_path):
    arguments = ("--run-dir", tmp_path, "--devices", 2, "--steps-per-loop", 500)
    run_well("diffusion.py", *arguments, "--steps", 500)
    second = run_well("diffusion.py", *arguments, "--steps", 2000)
    assert read_steps(second.stderr) == [1000, 1500, 2000]
    losses = re.findall(r"'loss': ([\d.]+)", second.stderr)
    assert float(losses[-1]) < 0.25
    [share] = re.findall(r"Recognized samples ([\d.]+)%", second.stdout)
    # By chance it is 10%. It is 96% after 5,000 steps.
    assert float(share) > 30.0
    assert read_picture(tmp_path / "samples.png").shape == (400, 640)
