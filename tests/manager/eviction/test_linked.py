from hypothesis import given
from hypothesis import strategies as st

from kvcascade.manager.eviction.linked import LinkedLists

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["put", "remove", "find", "release"]), st.integers(0, 9), st.booleans())
)


@given(OPERATIONS)
def test_the_lists_are_those_of_a_plain_model(operations):
    lists, model, parked = LinkedLists(2, 4), ([], []), {}
    for clock, (name, entry, which) in enumerate(operations):
        if name == "find":
            busy = {entry, entry + 1}
            found = list(lists.idle(which, busy.__contains__))
            parked |= {(stamp, each): which for stamp, each in model[which] if each in busy}
            model[which][:] = [(stamp, each) for stamp, each in model[which] if each not in busy]
            assert found == [each for _, each in model[which]]
        elif name == "release":
            for stamp, each in [known for known in parked if known[1] == entry]:
                home = parked.pop((stamp, each))
                lists.release(each, home)
                model[home].append((stamp, each))
                model[home].sort()
        else:
            for order in model:
                order[:] = [(stamp, each) for stamp, each in order if each != entry]
            parked = {known: home for known, home in parked.items() if known[1] != entry}
            if name == "put":
                lists.put(entry, which)
                model[which].append((clock, entry))
            elif entry < 4 or entry in lists:
                lists.remove(entry)
        assert [lists.coldest(which) for which in (0, 1)] == [
            order[0][1] if order else -1 for order in map(sorted, model)
        ]


def test_a_list_is_appended_to_another():
    lists = LinkedLists(2, 4)
    for entry, which in enumerate((0, 1, 1, 0)):
        lists.put(entry, which)
    lists.append(0, 1)
    assert list(lists.idle(0, lambda entry: False)) == [0, 3, 1, 2]
    assert lists.coldest(1) == -1


def test_the_entry_given_last_may_be_put_to_the_hot_end_and_is_met_again():
    lists = LinkedLists(1, 3)
    for entry in range(3):
        lists.put(entry, 0)
    walk = lists.idle(0, lambda entry: False)
    assert next(walk) == 0
    lists.put(0, 0)
    assert list(walk) == [1, 2, 0]
