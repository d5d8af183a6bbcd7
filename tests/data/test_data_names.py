"""What the room offers."""

import pellucid.data


def test_public_names_are_sorted_and_there() -> None:
    names = pellucid.data.__all__
    assert names == sorted(names, key=lambda name: (not name.isupper(), name))
    assert all(getattr(pellucid.data, name) for name in names)
