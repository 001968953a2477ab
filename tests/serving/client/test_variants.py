"""Variants that --modes names."""

import pytest

from serving.client.variants import ModeVariant, parse_variant, parse_variants
from stages.errors import InputError


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("ar", {}),
        (" ar:int8 ", {"codec": "int8"}),
        ("sweep:steps=16:fp32", {"codec": "fp32", "steps": 16}),
        ("chunked:chunk=4", {"chunk": 4}),
        ("resample:ar:chunk=12:candidates=64", {"scorer": "ar", "chunk": 12, "candidates": 64}),
        ("ar:temperature=0", {"temperature": 0.0}),
        ("resample:max_distance=0.5:draft=4", {"max_distance": 0.5, "draft": 4}),
        ("local", {}),
        ("local:copy", {}),
        ("steps:int8", {"codec": "int8"}),
    ],
)
def test_a_variant_is_parsed_into_mode_and_settings(text: str, settings: dict[str, object]) -> None:
    variant = parse_variant(text)
    assert variant.request() == {"mode": variant.mode, **settings}
    assert parse_variant(variant.label) == variant


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "--modes is empty"),
        ("swep", "unknown mode 'swep' in --modes (did you mean sweep or steps?); choose from sweep, chunked"),
        (":int8", "unknown mode ''"),
        ("ar:", "'' is not a setting; after the mode, separated by colons, give a codec or a scorer"),
        ("sweep:size=3", "unknown key 'size'; choose from max_bytes, max_tokens, chunk, temperature"),
        ("sweep:steps=few", "steps must be a whole number, not 'few'"),
        ("ar:temperature=nan", "temperature must be a number, not 'nan'"),
        ("sweep:int8:fp32", "names codec twice"),
        ("chunked:chunk=0", "chunk must be a whole number from 1"),
        ("ar,sweep,ar", "--modes names 'ar' twice"),
        ("sweep:draft=4", "mode sweep does not take draft: leave it out, or use mode ar-speculative"),
        ("resample:draft=4", "mode resample does not take draft: leave it out, or use mode ar-speculative"),
        ("sweep,ar:scorer", "'ar:scorer': mode ar does not take scorer: leave it out, or use mode resample"),
    ],
)
def test_an_invalid_variant_is_explained(text: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_variants(text)
    assert says in str(caught.value)
    with pytest.raises(InputError) as caught:
        parse_variants(text, option="entrants")
    assert says.replace("--modes", "entrants") in str(caught.value)
    assert "--modes" not in str(caught.value)


def test_having_keeps_settings_in_one_order() -> None:
    plain = ModeVariant("ar")
    assert plain.having(temperature=0.5, codec="int8") == plain.having(codec="int8").having(temperature=0.5)
    assert plain.having(codec="int8").having(codec=None) == plain
