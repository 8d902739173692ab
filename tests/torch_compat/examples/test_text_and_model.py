import itertools

import numpy as np
import pytest
import torch

from torch_compat.examples.model import LanguageModel, LanguageModelConfig, mean_loss
from torch_compat.examples.text import TextStream, standard_library, validation_batch

TEXT = (np.arange(1000) % 251).astype(np.uint8)


def take(stream, number):
    return torch.stack([s["input_ids"] for s in itertools.islice(stream, number)])


def test_the_standard_library_is_text_in_two_parts():
    text = standard_library()
    assert len(text.train) > 5 * len(text.validation) > 1_000_000
    assert b"import" in text.train[:100_000].tobytes()
    assert text.validation[:2000].tobytes() not in text.train.tobytes()


def test_the_stream_is_endless_shuffled_and_goes_on_anywhere():
    epoch = TextStream(TEXT, length=10, seed=0).epoch_size
    samples = take(TextStream(TEXT, length=10, seed=0), 3 * epoch)
    assert torch.equal(take(TextStream(TEXT, length=10, seed=0), 3 * epoch), samples)
    for skip in (1, epoch - 1, epoch, 2 * epoch + 5):
        rest = take(TextStream(TEXT, length=10, seed=0, skip=skip), 20)
        assert torch.equal(rest, samples[skip : skip + 20])
    assert not torch.equal(samples[:epoch], samples[epoch : 2 * epoch])
    assert not torch.equal(take(TextStream(TEXT, length=10, seed=(0, 1)), 20), samples[:20])
    begins = samples[:epoch, 0].tolist()
    assert begins != sorted(begins)
    # Every piece of an epoch once, each a piece of the text.
    assert len({tuple(sample) for sample in samples[:epoch].tolist()}) == epoch
    assert torch.equal(samples % 251, (samples[:, :1] + torch.arange(10)) % 251)


def test_wrong_sizes_of_the_stream():
    with pytest.raises(ValueError, match="`length` must be between 2 and half the text, 500"):
        TextStream(TEXT, length=501, seed=0)
    with pytest.raises(ValueError, match=r"`skip` .* must be >= 0, got -1"):
        TextStream(TEXT, length=10, seed=0, skip=-1)
    with pytest.raises(ValueError, match="too few for 50 samples of 40"):
        validation_batch(TEXT, num_samples=50, length=40)


def test_the_model_looks_only_back_and_knows_nothing_at_first():
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(length=16, width=48, heads=2))
    assert model.output.weight is model.embedding.weight
    tokens = torch.randint(256, (3, 16))
    logits = model(tokens)["logits"]
    changed = tokens.clone()
    changed[:, 9] += 1
    changed %= 256
    differs = (model(changed)["logits"] - logits).abs().amax((0, 2))
    assert (differs[:9] < 1e-6).all()
    assert differs[9:].min() > 1e-3
    assert abs(mean_loss(model, tokens, batch_size=2) - np.log(256)) < 0.5
    assert abs(mean_loss(model, tokens) - model(tokens, tokens)["loss"].item()) < 1e-5


def test_the_default_model_has_about_a_million_parameters():
    count = sum(p.numel() for p in LanguageModel(LanguageModelConfig()).parameters())
    assert 800_000 < count < 1_200_000


def test_wrong_sizes_of_the_model():
    with pytest.raises(ValueError, match="`layers` must be an int >= 1, got 0"):
        LanguageModelConfig(layers=0)
    with pytest.raises(ValueError, match="`width` must be a multiple of `heads`, got 50 and 3"):
        LanguageModelConfig(width=50, heads=3)
