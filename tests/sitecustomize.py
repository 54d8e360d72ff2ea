"""Python loads this module first in every process that the tests start: none of them reaches another machine."""

import offline

offline.refuse()
