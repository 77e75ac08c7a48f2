"""The dropped neighbourhood: what rebuilding a page would drag along, kept as running sums.

DTR (Kirisame et al., arXiv 2006.09616, "equivalence class" heuristic) charges a candidate with the
seconds of the dropped pages it is connected to through dropped pages, up to ancestors and down to
descendants. Keeping these sets exact is dear, so DTR keeps them in a union-find forest with a sum
at each root.

Note: the approximation
    1. A dropped page is one element; it is united with the elements of its dropped neighbours, and
       the sum of the set grows by its seconds.
    2. When it is rebuilt or released, its seconds leave the sum. The set is not split: pages that
       were connected only through it stay together until both are back.
    3. A page that is dropped again is a new element.
    4. Edges of a released page are forgotten. A recipe that still leads through it is not charged.

So the sum of a candidate is never below the exact one over the edges that are known.
"""

from __future__ import annotations

import numpy as np

from delta_runtime.core.events import FloatColumn, IntColumn


class Neighbourhood:
    """Union-find over dropped pages, with the seconds of each set at its root.

    Pages are known from `add` to `release`. All methods take page ids.

    Example:
        >>> near = Neighbourhood()
        >>> near.add(1)
        >>> near.add(2)
        >>> near.link(2, 1)
        >>> near.drop(1, 0.5)
        >>> near.seconds_near(np.array([2]))
        array([0.5])
    """

    __slots__ = ("_element", "_neighbours", "_parent", "_seconds", "_sum")

    def __init__(self) -> None:
        self._neighbours: dict[int, set[int]] = {}
        self._element: dict[int, int] = {}  # dropped page -> its element
        self._seconds: dict[int, float] = {}  # dropped page -> what it added to its set
        self._parent: list[int] = []
        self._sum: list[float] = []  # true at roots only

    def add(self, page: int) -> None:
        """Make a page known, resident and without edges."""
        self._neighbours[page] = set()

    def link(self, page: int, ancestor: int) -> None:
        """Say that `page` was made from `ancestor`; ignored unless both are known."""
        neighbours = self._neighbours
        if page == ancestor or page not in neighbours or ancestor not in neighbours:
            return
        neighbours[page].add(ancestor)
        neighbours[ancestor].add(page)
        if page in self._element and ancestor in self._element:
            self._unite(self._root(self._element[page]), self._root(self._element[ancestor]))

    def drop(self, page: int, seconds: float) -> None:
        """Turn a resident page into an element and unite it with its dropped neighbours."""
        # Rule 1 and 3 of the Note.
        element = self._element
        if len(self._parent) >= 1024 + 4 * len(element):
            self._compact()
        root = len(self._parent)
        self._parent.append(root)
        self._sum.append(seconds)
        for neighbour in self._neighbours[page]:
            other = element.get(neighbour)
            if other is not None:
                root = self._unite(root, self._root(other))
        element[page] = root
        self._seconds[page] = seconds

    def rebuild(self, page: int) -> None:
        """Take the seconds of a dropped page out of its set; the set is not split."""
        # Rule 2 of the Note.
        root = self._root(self._element.pop(page))
        self._sum[root] -= self._seconds.pop(page)

    def release(self, page: int) -> None:
        """Forget a page, dropped or not, and its edges."""
        # Rule 2 and 4 of the Note.
        if page in self._element:
            self.rebuild(page)
        for neighbour in self._neighbours.pop(page):
            self._neighbours[neighbour].discard(page)

    def seconds_near(self, pages: IntColumn) -> FloatColumn:
        """Return, for each page, the sum over the distinct dropped sets that touch it.

        Args:
            pages: Known resident pages, increasing.

        Returns:
            Seconds, never negative; zero for a page without dropped neighbours.
        """
        result = np.zeros(len(pages))
        near: list[int] = []
        roots: list[int] = []
        for page, element in self._element.items():
            neighbours = self._neighbours[page]
            near.extend(neighbours)
            roots.extend([self._root(element)] * len(neighbours))
        if not near or not len(pages):
            return result
        touched = np.array(near, np.int64)
        where = np.minimum(np.searchsorted(pages, touched), len(pages) - 1)
        wanted = pages[where] == touched
        pairs = np.unique(where[wanted] * len(self._sum) + np.array(roots, np.int64)[wanted])
        sums = np.maximum(np.array(self._sum), 0.0)  # rounding may leave a little less than nothing
        index, root = np.divmod(pairs, len(self._sum))
        result += np.bincount(index, weights=sums[root], minlength=len(pages))
        return result

    def faults(self, pages: IntColumn, dropped: IntColumn) -> list[str]:
        """Return what is wrong with the sums, sets and edges; empty when all is well.

        Args:
            pages: The pages that ought to be known.
            dropped: Those of them that ought to be dropped.
        """
        faults = []
        if set(pages.tolist()) != set(self._neighbours):
            faults.append("the pages with neighbours are not the live pages")
        if set(dropped.tolist()) != set(self._element) or set(self._element) != set(self._seconds):
            faults.append("the elements are not the dropped pages")
        brute = [0.0] * len(self._sum)
        for page, element in self._element.items():
            brute[self._root(element)] += self._seconds[page]
        roots = [each for each, parent in enumerate(self._parent) if each == parent]
        for root in roots:
            if not np.isclose(self._sum[root], brute[root], rtol=1e-9, atol=1e-9):
                faults.append(f"a set has the sum {self._sum[root]}, its pages make {brute[root]}")
        for page, neighbours in self._neighbours.items():
            for neighbour in neighbours:
                if page not in self._neighbours.get(neighbour, ()):
                    faults.append(f"the edge {page} - {neighbour} is known at one end only")
                elif {page, neighbour} <= self._element.keys() and self._root(
                    self._element[page]
                ) != self._root(self._element[neighbour]):
                    faults.append(f"{page} and {neighbour} are dropped neighbours in two sets")
        return faults

    def _compact(self) -> None:
        """Forget the empty sets and renumber the others."""
        live: dict[int, int] = {}  # old root -> new root
        for page, element in self._element.items():
            self._element[page] = live.setdefault(self._root(element), len(live))
        self._sum = [self._sum[root] for root in live]
        self._parent = list(range(len(live)))

    def _root(self, element: int) -> int:
        """Return the root of an element, halving the path to it."""
        parent = self._parent
        above = parent[element]
        while above != element:
            parent[element] = element = parent[above]
            above = parent[element]
        return element

    def _unite(self, left: int, right: int) -> int:
        """Unite two roots and return the root of the union (the older: paths stay short enough)."""
        if left == right:
            return left
        if right < left:
            left, right = right, left
        self._parent[right] = left
        self._sum[left] += self._sum[right]
        return left
