// The color theme: the system's, or the one chosen here. A classic script in the head, so that nothing
// is painted in the wrong one first; the button is wired once it is there.
(() => {
  const CHOICES = ["auto", "light", "dark"];
  const NAMES = { auto: "as the system", light: "light", dark: "dark" };
  const stored = localStorage.getItem("trident-theme");
  let choice = CHOICES.includes(stored) ? stored : "auto";

  function apply() {
    if (choice === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = choice;
    const button = document.getElementById("theme");
    if (button) {
      button.textContent = `Theme: ${choice}`;
      button.setAttribute("aria-label", `Color theme: ${NAMES[choice]}`);
    }
    window.dispatchEvent(new Event("themechange")); // canvases have colors of their own
  }

  apply();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  document.addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", () => {
      choice = CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length];
      localStorage.setItem("trident-theme", choice);
      apply();
    });
    apply();
  });
})();
