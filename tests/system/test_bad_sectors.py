"""A disk loses the first sector of files of a run: both sides start again and go on with everything."""

import pytest
from lab import LENGTH, TAIL, Lab

pytestmark = pytest.mark.slow  # what each file needs is tested in tests/transport/storage


@pytest.fixture
def lab(tmp_path, environment):
    lab = Lab(tmp_path, environment)
    yield lab
    lab.close()


def lose_first_sector(file) -> None:
    data = file.read_bytes()
    assert len(data) > 4096
    file.write_bytes(bytes(4096) + data[4096:])


def test_a_bad_first_sector_of_a_journal_or_a_spool_loses_nothing(lab):
    """Of an older and the newest segment of the journal, and of the spool with records that no learner has yet."""
    learner, actor = lab.learner(), lab.actor()
    lab.trains(learner)
    learner.kill()
    learner = lab.learner()
    learner.says("online steps put back")
    lab.goes_on(LENGTH, actor)
    learner.kill()
    lab.goes_on(LENGTH, actor)
    actor.kill()
    older, newest = sorted((lab.run / "journal" / "online").glob("*.journal"))
    [*_, spool] = sorted(lab.spool.rglob("*.journal"))
    for file in (older, newest, spool):
        lose_first_sector(file)
    learner, actor = lab.learner(), lab.actor()
    lab.trains(learner)
    lab.goes_on(LENGTH, actor)
    output, said, account = lab.stop(learner, actor)
    for file, lines in ((older, output), (newest, output), (spool, said)):
        assert f"the damaged first sector of {file.name} was mended, no entry is lost" in lines
    assert sum(account.cut.values()) <= TAIL
    assert account.died == 1
    after = sorted((lab.run / "journal" / "online").glob("*.journal"))
    assert after[:2] == [older, newest]
    assert len(after) == 3
