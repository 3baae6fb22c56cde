// Rank search results: pages for users before internals, and a page about the words before one that mentions them.
// Sphinx gives every page that contains a word the same score and then sorts by title.
const FOLDERS = [
  ["get-started/", 6],
  ["train/", 9],
  ["scale/", 8],
  ["operate/", 8],
  ["migrate/", 4],
  ["concepts/", 4],
  ["reference/import-keys/", -12],
  ["reference/guarantees", -25],
  ["reference/", 2],
  ["internals/", -25],
  ["project/", -30],
];

var Scorer = {
  score: (result) => {
    const [docname, , , , score] = result;
    const found = FOLDERS.find(([folder]) => docname.startsWith(folder));
    return score + (found ? found[1] : 0);
  },
  // config keys, options and classes: below a page that has the words in its title
  objNameMatch: 11,
  objPartialMatch: 4,
  objPrio: { 0: 8, 1: 3, 2: -5 },
  objPrioDefault: 0,
  title: 22,
  partialTitle: 9,
  term: 5,
  partialTerm: 2,
};
