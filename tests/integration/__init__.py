import pytest

# Before anything imports them: their assertions say as much as those of a test file.
pytest.register_assert_rewrite("tests.integration.serving", "tests.integration.stage")
